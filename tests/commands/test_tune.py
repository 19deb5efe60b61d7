import json

import pytest
import yaml

from lightning_ups.__main__ import main
from lightning_ups.commands import tune
from lightning_ups.insight.tune import Axis, Engine, Result, Setting, Situation, Space
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
    facts, overlay = run(tmp_path, monkeypatch, "--seconds", "1.5", "--minutes", "10")
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


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(tune, "Engine", Table)
    monkeypatch.setattr(tune, "Space", lambda situation: Space(situation, AXES))
    monkeypatch.setattr(Table, "runs", 0)
    monkeypatch.setattr(Table, "interrupts", False)
    monkeypatch.setattr(Table, "verify", (0, "ok"))


@pytest.mark.usefixtures("table")
def test_a_repeated_search_runs_nothing(tmp_path, monkeypatch, capsys):
    facts, _ = run(tmp_path, monkeypatch)
    assert facts["best"] == "pause: none"
    assert "over stock Lightning" in (printed := capsys.readouterr()).out
    assert "fit --config run.yaml --config tuned.yaml" in printed.out
    assert "tune: pause: none" in printed.err, "lines if stderr is not a terminal"
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
        ((1, "the first block departs"), "stock Lightning", "rejected by verify: the first block departs"),
        ((1, "Traceback (most recent call last)\nOutOfMemoryError"), "pause: none", "not verified: OutOfMemoryError"),
        ((None, ""), "pause: none", "not verified: it did not end"),
    ],
)
def test_what_verify_says_decides(tmp_path, monkeypatch, verify, best, text):
    monkeypatch.setattr(Table, "verify", verify)
    facts, _ = run(tmp_path, monkeypatch)
    assert facts["best"] == best
    assert any(text in f"{row['why']} {row['verified']}" for row in facts["rows"])


@pytest.mark.usefixtures("table")
def test_a_preset_is_beaten_or_kept(tmp_path, monkeypatch):
    facts, overlay = run(tmp_path, monkeypatch, settings={**BASE, "preset": "cpu"})
    assert "preset cpu" in [row["name"] for row in facts["rows"]]
    assert overlay.read_text().splitlines()[2].startswith("preset: none")


def test_the_facts_of_a_run_decide_its_axes(monkeypatch, tmp_path, capsys):
    seen = []

    def space(situation):
        seen.append(situation)
        return Space(situation)

    monkeypatch.setattr(tune, "Engine", Table)
    monkeypatch.setattr(tune, "Space", space)
    settings = {**BASE, "optimizer": {"class_path": "AdamW", "init_args": {"fused": False, "lr": 0.1}}}
    run(tmp_path, monkeypatch, "--keep-global-batch", "--trainer.accumulate_grad_batches=2", settings=settings)
    assert isinstance(seen[0], Situation)
    assert (seen[0].batch, seen[0].accumulated, seen[0].on_gpu) == (4, 2, False)
    error = capsys.readouterr().err
    assert "microbatch" in error
    assert "tune: fixed by your settings: optimizer step" in error
