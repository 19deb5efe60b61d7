import json
import random
import re
import time
from dataclasses import replace
from io import StringIO

import pytest
import yaml
from rich.console import Console

from lightning_ups.__main__ import main
from lightning_ups.commands import tune
from lightning_ups.insight.tune import Axis, Configuration, Engine, Progress, Result, Row, Setting, Situation, Space
from tests.insight.tune.injected import Sleeping, engine_here

BASE = {
    "model": {"class_path": "tests.insight.tune.injected.Timed"},
    "data": {"class_path": "tests.insight.tune.injected.Sized", "init_args": {"batch_size": 4}},
    "trainer": {"accelerator": "cpu", "max_steps": 1000},
}
SLEEPING = "trainer: {callbacks+: [{class_path: %s.Sleeping, init_args: {seconds: %s}}]}"
AXES = [
    Axis(
        name="pause",
        settings=[
            Setting(name="long"),
            Setting(name="short", yaml="model: {init_args: {seconds: 0.03}}"),
            Setting(name="none", yaml="model: {init_args: {seconds: 0.001}}"),
            Setting(name="exhausted", yaml="model: {init_args: {exhausts: true}}"),
        ],
    ),
    Axis(
        name="delay",
        settings=[
            Setting(name="none"),
            Setting(name="long", yaml=SLEEPING % (Sleeping.__module__, 0.2)),
            Setting(name="refused", yaml="trainer: {callbacks+: [{class_path: Compile, init_args: {scope: all}}]}"),
        ],
    ),
    Axis(name="late logs", settings=[Setting(name="off"), Setting(name="on", yaml="flags: {late_logs: true}")]),
]


def run(tmp_path, monkeypatch, *options, settings=None, code=0):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE if settings is None else settings))
    assert main(["tune", "--config", "run.yaml", "--store", "store", *options]) == code
    newest = max(tmp_path.glob("tuned*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text()), newest.with_suffix(".yaml")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_the_fastest_settings_are_found_verified_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "Engine", engine_here())
    monkeypatch.setattr(tune, "Space", lambda situation: Space(situation, AXES))
    monkeypatch.setattr(tune, "_VERIFY", ("true",))
    facts, overlay = run(tmp_path, monkeypatch, "--seconds", "0.6", "--minutes", "10")
    assert "pause: none" in facts["best"]
    assert "delay" not in facts["best"]
    whys = {row["name"]: row["why"] or (row["result"] or {}).get("failure") for row in facts["rows"]}
    assert whys["pause: exhausted"] == "out of memory"
    assert any(why and why.startswith("refused: ") and "scope" in why for why in whys.values())
    assert facts["gain_over_stock"]["low"] > 0.5
    text = overlay.read_text()
    assert text.count("pause: none, +") == 1
    assert yaml.safe_load(text)["model"]["init_args"] == {"seconds": 0.001}
    assert main(["fit", "--config", "run.yaml", "--config", overlay.name, "--trainer.max_steps", "2"]) == 0
    assert "stock Lightning" in capsys.readouterr().out


class Table(Engine):
    """Returns rates by fragments."""

    runs, interrupts = 0, False
    verify = 0, ""

    def _run(self, words, effort, slot):
        Table.runs += 1
        if Table.interrupts and Table.runs > 4:
            raise KeyboardInterrupt
        text = " ".join(words)
        rate = 100.0 * (2 if "0.001" in text else 1) * (0.5 if "Sleeping" in text else 1)
        return Result(samples_per_s=rate, error=0.001, losses=[2.0], peak_bytes=2**30, device="cpu", step_s=0.01)

    def call(self, command, **options):
        assert "verify" in command
        Table.runs += 1
        return Table.verify


def refused(_, configuration):
    """Return what `tune` would, which builds a command line for each configuration."""
    return "refused: scope" if "scope: all" in " ".join(configuration.all_words) else None


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(tune, "Engine", Table)
    monkeypatch.setattr(tune, "Space", lambda situation: Space(situation, AXES))
    monkeypatch.setattr(tune, "_refused", refused)
    monkeypatch.setattr(Table, "runs", 0)
    monkeypatch.setattr(Table, "interrupts", False)
    monkeypatch.setattr(Table, "verify", (0, "ok"))


@pytest.mark.usefixtures("table")
def test_a_repeated_search_runs_nothing(tmp_path, monkeypatch, capsys):
    facts, _ = run(tmp_path, monkeypatch)
    assert facts["best"] == "pause: none"
    assert "over stock Lightning" in (printed := capsys.readouterr()).out
    assert "fit --config run.yaml --config tuned.yaml" in printed.out
    assert "] pause: none  200" in printed.err, "lines if stderr is not a terminal"
    Table.runs = 0
    again, overlay = run(tmp_path, monkeypatch)
    assert (again["best"], Table.runs) == (facts["best"], 0)
    assert overlay.name == "tuned-2.yaml"
    html = (tmp_path / "tuned.html").read_text()
    assert "<svg" in html


@pytest.mark.usefixtures("table")
def test_an_interrupted_search_writes_the_best_so_far(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Table, "interrupts", True)
    facts, overlay = run(tmp_path, monkeypatch)
    assert not facts["is_complete"]
    assert "Interrupted" in capsys.readouterr().out
    assert "verify: not asked" in overlay.read_text()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("verify", "best", "text"),
    [
        (
            (1, "reference: float32\nRED: the first block departs:\n  step 0"),
            "stock Lightning",
            "rejected by verify: the first block departs",
        ),
        ((1, "Traceback (most recent call last)\nOutOfMemoryError"), "pause: none", "not verified: OutOfMemoryError"),
        ((1, "error: Toy: ValueError: none"), "pause: none", "not verified: error: Toy: ValueError: none"),
        ((0, "compared on one device; what 2 devices\nGREEN"), "pause: none", "passed on one device"),
        ((None, ""), "pause: none", "not verified: it did not end"),
    ],
)
def test_what_verify_says_decides(tmp_path, monkeypatch, verify, best, text):
    monkeypatch.setattr(Table, "verify", verify)
    facts, _ = run(tmp_path, monkeypatch)
    assert facts["best"] == best
    assert any(text in f"{row['why']} {row['verified']}" for row in facts["rows"])


@pytest.mark.usefixtures("table")
def test_a_verification_without_a_verdict_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Table, "verify", (None, ""))
    run(tmp_path, monkeypatch)
    monkeypatch.setattr(Table, "verify", (0, "GREEN"))
    facts, _ = run(tmp_path, monkeypatch)
    assert [row["verified"] for row in facts["rows"] if row["name"] == facts["best"]] == ["passed"]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("preset", [None, "cpu"])
def test_a_search_that_tried_nothing_says_so_and_its_file_is_valid(tmp_path, monkeypatch, capsys, preset):
    monkeypatch.setattr(tune, "Space", lambda situation: Space(situation, []))
    given = {} if preset is None else {"preset": preset}
    facts, overlay = run(tmp_path, monkeypatch, settings={**BASE, **given})
    assert (facts["best"], facts["gain_over_stock"]) == ("stock Lightning", None)
    said = "nothing else was tried" if preset is None else "nothing faster was found beyond doubt"
    assert said in capsys.readouterr().out
    text = overlay.read_text()
    assert said in text.lower()
    assert "%" not in text
    assert isinstance(yaml.safe_load(text), dict)
    assert main(["fit", "--config", "run.yaml", "--config", overlay.name, "--trainer.max_steps", "2"]) == 0


@pytest.mark.usefixtures("table")
def test_an_interrupt_before_the_first_choice_leaves_a_valid_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Table, "interrupts", True)
    monkeypatch.setattr(Table, "runs", 3)
    facts, overlay = run(tmp_path, monkeypatch)
    assert not facts["is_complete"]
    text = overlay.read_text()
    assert "interrupted" in text
    assert yaml.safe_load(text) == {}
    assert main(["fit", "--config", "run.yaml", "--config", overlay.name, "--trainer.max_steps", "2"]) == 0


NOISE = random.Random(0)


@pytest.mark.usefixtures("table")
def test_the_run_that_is_compared_with_is_named_by_what_it_is(tmp_path, monkeypatch, capsys):
    parts = {"callbacks": [{"class_path": "DevicePrefetch"}], "plugins": [{"class_path": "BF16Precision"}]}
    settings = {**BASE, "trainer": {**BASE["trainer"], **parts}, "preset": "cpu"}
    facts, _ = run(tmp_path, monkeypatch, settings=settings)
    assert facts["rows"][0]["name"] == "your settings"
    printed = capsys.readouterr()
    assert "over your settings" in printed.out
    assert "stock Lightning" not in printed.out
    assert "your settings without the preset have DevicePrefetch, BF16Precision, and stay" in printed.err


@pytest.mark.usefixtures("table")
def test_axes_that_the_file_fixes_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "Space", Space)
    data = {"class_path": BASE["data"]["class_path"], "init_args": {"batch_size": 4, "num_workers": 0}}
    settings = {**BASE, "data": data, "trainer": {**BASE["trainer"], "precision": "bf16-mixed"}}
    run(tmp_path, monkeypatch, settings=settings)
    error = capsys.readouterr().err
    assert "tune: no axis to search on this device\n" in error
    assert "tune: fixed by your settings: precision, microbatch, loader workers\n" in error


@pytest.mark.usefixtures("table")
def test_a_preset_for_which_there_was_no_time_is_not_said_to_have_failed(tmp_path, monkeypatch, capsys):
    class Slow(Table):
        def _run(self, words, effort, slot):
            time.sleep(0.5)
            return super()._run(words, effort, slot)

    monkeypatch.setattr(tune, "Engine", Slow)
    run(tmp_path, monkeypatch, "--minutes", "0.005", settings={**BASE, "preset": "cpu"})
    assert "nothing else was tried: the time was over" in capsys.readouterr().out


class Noisy(Table):
    """Has time for one round of the final; nothing differs."""

    def _run(self, words, effort, slot):
        time.sleep(1.5 if effort.round else 0)
        return replace(super()._run(["none"], effort, slot), samples_per_s=100.0 * NOISE.gauss(1, 0.03))


def test_one_round_claims_nothing(tmp_path, monkeypatch, capsys, table):
    monkeypatch.setattr(tune, "Engine", Noisy)
    facts, overlay = run(tmp_path, monkeypatch, "--minutes", "0.04")
    assert facts["best"] == "stock Lightning"
    assert max(len(row["finals"]) for row in facts["rows"]) == 1
    assert "one round only" in capsys.readouterr().out
    assert "one round only" in overlay.read_text()


@pytest.mark.usefixtures("table")
def test_memory_is_named_where_it_is_the_objective(tmp_path, monkeypatch, capsys):
    class Small(Table):
        def _run(self, words, effort, slot):
            found = super()._run(words, effort, slot)
            return replace(found, peak_bytes=2**29 if "0.03" in " ".join(words) else 2**30)

    monkeypatch.setattr(tune, "Engine", Small)
    _, overlay = run(tmp_path, monkeypatch, "--objective", "memory")
    assert "512 MiB of memory instead of 1.0 GiB" in capsys.readouterr().out
    assert "pause: short, -50.0% of memory" in overlay.read_text()


@pytest.mark.usefixtures("table")
def test_lines_tell_the_time_and_what_runs_for_long(tmp_path, monkeypatch, capsys):
    class Slow(Table):
        def _run(self, words, effort, slot):
            time.sleep(0.1)
            return super()._run(words, effort, slot)

    monkeypatch.setattr(tune, "Engine", Slow)
    monkeypatch.setattr(tune, "_REMINDS_EVERY", 0.03)
    run(tmp_path, monkeypatch)
    error = capsys.readouterr().err
    times = [int(minutes) * 60 + int(seconds) for minutes, seconds in re.findall(r"tune: \[(\d+):(\d+)\]", error)]
    assert times == sorted(times)
    assert re.search(r"tune: \[0:0\d\] single changes, \d of \d+: \S.* for 0 s; at most 19:5\d left", error)
    assert "this step about 0:0" in error
    assert re.search(r"tune: \[0:0\d\] pause: short  100", error)


def test_the_live_table_draws_its_clock(monkeypatch):
    row = Row(name="a", choice={}, configuration=Configuration(words=[]), result=Result(samples_per_s=3.0))
    progress = Progress(rows=[row], doing="final", running=["a"], passed_s=61, left_s=100, step_left_s=None)
    shown = tune._live_table([(progress, time.monotonic())])
    assert shown.row_count == 1
    assert shown.title == "tune: [1:01] final: a for 0 s; at most 1:39 left"
    assert tune._live_table([]).row_count == 0
    late = tune._live_table([(replace(progress, left_s=0.0), time.monotonic())])
    assert str(late.title).endswith("; the time is over, and it ends soon")


def test_a_terminal_shows_a_live_table(monkeypatch):
    screen = Console(file=StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr(tune, "Console", lambda **_: screen)
    row = Row(name="a", choice={}, configuration=Configuration(words=[]), result=Result(samples_per_s=3.0))
    with tune._shown() as show:
        show(Progress(rows=[row], doing="final", running=["a"], passed_s=61, left_s=100, step_left_s=7))
        time.sleep(1.5)
    text = screen.file.getvalue()
    assert "at most 1:3" in text
    assert "Ctrl-C" in text
    assert "a" in text


@pytest.mark.usefixtures("table")
def test_a_preset_is_beaten_or_kept(tmp_path, monkeypatch):
    facts, overlay = run(tmp_path, monkeypatch, settings={**BASE, "preset": "cpu"})
    assert "preset cpu" in [row["name"] for row in facts["rows"]]
    assert "\npreset: none  # the lines below replace it\n" in overlay.read_text()


def test_the_facts_of_a_run_decide_its_axes(monkeypatch, tmp_path, capsys):
    seen = []

    def space(situation):
        seen.append(situation)
        return Space(situation)

    monkeypatch.setattr(tune, "Engine", Table)
    monkeypatch.setattr(tune, "Space", space)
    monkeypatch.setattr(tune, "_refused", refused)
    settings = {**BASE, "optimizer": {"class_path": "AdamW", "init_args": {"fused": False, "lr": 0.1}}}
    settings["trainer"] = {**BASE["trainer"], "accumulate_grad_batches": 2}
    run(tmp_path, monkeypatch, "--keep-global-batch", settings=settings)
    assert isinstance(seen[0], Situation)
    assert (seen[0].batch, seen[0].accumulated, seen[0].on_gpu) == (4, 2, False)
    error = capsys.readouterr().err
    assert "microbatch" in error
    assert "tune: fixed by your settings: optimizer step" in error
    run(tmp_path, monkeypatch, "--keep-global-batch", "--data.batch_size=4", settings=settings)
    assert "microbatch stays, since no file can replace options: --data.batch_size" in capsys.readouterr().err
