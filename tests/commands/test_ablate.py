import json

import pytest
import yaml

from lightning_ups.__main__ import main
from lightning_ups.commands import ablate
from lightning_ups.insight.tune import Engine, Result
from tests.insight.tune.injected import Sleeping, engine_here

BASE = {
    "model": {"class_path": "tests.insight.tune.injected.Timed", "init_args": {"seconds": 0.1}},
    "data": {"class_path": "tests.cli_toys.Data", "init_args": {"size": 640}},
    "trainer": {"accelerator": "cpu", "max_steps": 1000},
}
INJECTED = f"{Sleeping.__module__}."
SLOW = {"trainer": {"callbacks": [{"class_path": INJECTED + "Sleeping", "init_args": {"seconds": 0.2}}]}}
IDLE = {"trainer": {"callbacks": [INJECTED + "Idle"]}}
FAST = {"model": {"init_args": {"seconds": 0.01}}}
FULL = {"model": {"init_args": {"exhausts": True}}}


def write(folder, **trees):
    for name, tree in trees.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))


def run(tmp_path, monkeypatch, *fragments, options=()):
    monkeypatch.chdir(tmp_path)
    added = [word for name in fragments for word in ("--with", f"{name}.yaml")]
    options = ["--store", str(tmp_path / "store"), *options]
    assert main(["ablate", "--config", "run.yaml", *added, *options]) == 0
    newest = max(tmp_path.glob("ablate*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text())


@pytest.mark.slow  # it sleeps in each step; the others have results from a table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_a_slow_addition_is_harmful_one_without_effect_neutral_a_fast_one_worth_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "Engine", engine_here())
    write(tmp_path, run=BASE, slow=SLOW, idle=IDLE)
    facts = run(tmp_path, monkeypatch, "idle", "slow", options=["--rounds", "3", "--seconds", "1.5"])
    without = {row["name"].removeprefix("without "): row for row in facts["left_out"]}
    assert without["slow"]["verdict"] == "harmful"
    assert without["idle"]["verdict"] == "neutral"
    assert facts["ladder"][-1]["name"] == "+ slow", "in the order of gain"
    assert "harmful" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "ablate.html").read_text()


class Table(Engine):
    """Returns results by the settings of a configuration, without running it."""

    runs, stops_after = 0, 10**9

    def _run(self, words, effort, slot):
        Table.runs += 1
        if Table.runs > Table.stops_after:
            raise KeyboardInterrupt
        text = " ".join(words)
        if "exhausts" in text:
            return Result(failure="out of memory", text="on purpose")
        rate = 100.0 * (0.5 if "Sleeping" in text else 1) * (2 if "0.01" in text else 1) + 0.001 * effort.round
        return Result(samples_per_s=rate, error=0.002, losses=[3.0 if "Idle" in text else 2.0], peak_bytes=2**30)


def test_the_ladder_is_in_the_order_of_gain_and_failures_cost_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "Engine", Table)
    write(tmp_path, run=BASE, slow=SLOW, fast=FAST, full=FULL)
    facts = run(tmp_path, monkeypatch, "slow", "full", "fast")
    assert [row["name"] for row in facts["ladder"]] == ["as configured", "+ fast", "+ slow", "+ full"]
    assert [row["verdict"] for row in facts["ladder"][1:]] == ["worth it", "harmful", "harmful: out of memory"]
    assert facts["ladder"][1]["gain"]["value"] == pytest.approx(1, abs=0.01)
    printed = capsys.readouterr()
    assert "out of memory: on purpose" in printed.out
    assert "ablate: 20 trials in 3 rounds\n" in printed.err
    assert "ablate: round 1: plain: 100 samples/s (1 of 20 trials, about 0:00 left)\n" in printed.err


def test_a_repeated_call_measures_nothing_and_overwrites_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "Engine", Table)
    write(tmp_path, run=BASE, idle=IDLE, fast=FAST)
    first = run(tmp_path, monkeypatch, "idle", "fast")
    Table.runs = 0
    assert run(tmp_path, monkeypatch, "idle", "fast") == first
    assert Table.runs == 0
    assert (tmp_path / "ablate-2.html").exists()
    without = {row["name"]: row for row in first["left_out"]}
    assert without["without idle"]["verdict"] == "neutral; the loss differs"


def test_one_round_cannot_tell(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "Engine", Table)
    write(tmp_path, run=BASE, idle=IDLE, fast=FAST)
    facts = run(tmp_path, monkeypatch, "idle", "fast", options=["--rounds", "1"])
    assert {row["verdict"].split(";")[0] for row in facts["ladder"][1:]} == {"one round cannot tell"}
    assert facts["ladder"][1]["gain"] == {"value": pytest.approx(1), "low": None, "high": None}
    assert "+100.0% [not known]" in capsys.readouterr().out


def test_without_fragments_the_parts_of_the_preset_are_added_to_stock(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "Engine", Table)
    write(tmp_path, run={**BASE, "preset": "cpu"})
    facts = run(tmp_path, monkeypatch)
    assert facts["plain"] == "stock Lightning"
    assert [row["name"] for row in facts["ladder"]] == ["stock Lightning", "+ trainer.precision"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--with", "full.yaml", "--rounds", "0"], "--rounds 0"),
        ([], "nothing to add"),
        (["--with", "absent.yaml"], "absent.yaml"),
        (["--with", "idle.yaml", "--model.exhausts", "true"], "out of memory"),
    ],
)
def test_what_cannot_be_measured_is_an_error(tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.setattr(ablate, "Engine", Table)
    write(tmp_path, run=BASE, full=FULL, idle=IDLE)
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "--config", "run.yaml", "--store", "store", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(("stops_after", "code"), [(7, 0), (2, 130)])
def test_ctrl_c_returns_what_there_is_once_each_configuration_was_measured(tmp_path, monkeypatch, stops_after, code):
    monkeypatch.setattr(ablate, "Engine", Table)
    monkeypatch.setattr(Table, "runs", 0)
    monkeypatch.setattr(Table, "stops_after", stops_after)
    write(tmp_path, run=BASE, idle=IDLE, fast=FAST)
    monkeypatch.chdir(tmp_path)
    words = ["--with", "idle.yaml", "--with", "fast.yaml", "--store", "store"]
    assert main(["ablate", "--config", "run.yaml", *words]) == code
    assert (tmp_path / "ablate.json").exists() == (code == 0)
