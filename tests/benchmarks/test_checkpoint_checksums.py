import json
import sys

import pytest
import torch

from lightning_ups.state.checkpoint import Saver
from lightning_ups.state.checkpoint.checksums import DamagedFileError
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("checkpoint_checksums")


@pytest.fixture
def summary_of(script, tmp_path, monkeypatch, capsys):
    """Run the script on a small checkpoint; return its summary, and its rounds or what it printed."""

    def summary_of(*words):
        monkeypatch.chdir(tmp_path)
        sizes = ["--gigabytes", "0.03", "--folder", str(tmp_path), "--device", "cpu", "--output", "out"]
        monkeypatch.setattr(sys, "argv", ["checkpoint_checksums.py", *sizes, *words])
        script.main()
        assert not [*tmp_path.glob("tmp*")], "checkpoints are deleted"
        lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
        return json.loads((tmp_path / "out" / "summary.json").read_text()), lines, capsys.readouterr().out

    return summary_of


def test_it_measures_both_sides_in_memory_and_on_disk(summary_of, tmp_path):
    words = ["--disk-gigabytes", "0.01", "--rounds", "2", "--disk", str(tmp_path)]
    summary, lines, printed = summary_of(*words)
    order = [(line["place"], line["round"], line["side"]) for line in lines]
    turns = [(0, "without"), (0, "with"), (1, "with"), (1, "without"), (2, "without"), (2, "with")]
    assert order == [(place, *turn) for place in ("memory", "disk") for turn in turns]
    assert summary["memory"]["gigabytes"] > 2 * summary["disk"]["gigabytes"] > 0.01
    assert summary["memory"]["rounds"] == 2, "the first round is left out"
    for figure in ("sync_s", "blocked_s", "background_s", "load_s"):
        assert summary["disk"][figure]["with"] > 0
        assert figure in printed


def test_loads_are_compared_by_turns_and_in_parts(summary_of):
    summary, rounds, _ = summary_of("--disk-gigabytes", "0", "--loads", "2", "--breakdown")
    sides = ["without", "unverified", "with"]
    orders = {tuple(side for side in one if side in sides) for one in rounds}
    assert len(orders) == len(rounds), "each round has another order"
    assert all({*order} == {*sides} for order in orders)
    for one in rounds:
        assert "sum on host" in one["with"]["parts"]
        assert "sum on host" not in one["without"]["parts"] | one["unverified"]["parts"]
        assert one["unverified"]["parts"]["parse"][1] < one["without"]["parts"]["parse"][1], "each kind once"
    assert summary["memory"]["load_s"]["with"] == summary["memory, against unverified"]["load_s"]["with"]
    assert summary["memory"]["parts"]["read"]["with"][0] > 0


def test_saves_alone_are_compared(summary_of):
    summary, *_ = summary_of("--saves", "2")
    assert [*summary] == ["memory"]
    assert summary["memory"]["rounds"] == 2
    assert summary["memory"]["sync_s"]["with"] > 0
    assert "load_s" not in summary["memory"]


def test_the_ratio_of_each_round_is_compared(script):
    rounds = [
        {"without": dict.fromkeys(script.FIGURES, before), "with": dict.fromkeys(script.FIGURES, after)}
        for before, after in [(1.0, 1.1), (2.0, 2.0), (4.0, 8.0)]
    ]
    expected = {"without": 2.0, "with": 2.0, "ratio": 1.1, "least": 1.0, "most": 2.0}
    assert script._compared(rounds)["load_s"] == expected


def test_without_checksums_none_are_computed_or_verified(script, tmp_path):
    weight = torch.randn(2**18)

    def saved(path):
        Saver(asynchronous=False, threads=1).save({"state_dict": {"w": weight}}, files={}, path=path)
        file, target = path / "__0_0.distcp", torch.zeros(2**18)
        data = bytearray(file.read_bytes())
        data[2**19] ^= 1
        file.write_bytes(data)
        read_into({"state_dict.w": target}, FolderReader(path))
        return target

    with script._without_checksums():
        assert saved(tmp_path / "a").ne(weight).sum() == 1
        [[*_, sums]] = json.loads((tmp_path / "a" / "checksums.json").read_text())["__0_0.distcp"]
        assert len(sums) == 2, "of what surrounds the tensor"
    with script._without_verifying():
        assert saved(tmp_path / "b").ne(weight).sum() == 1
    with pytest.raises(DamagedFileError):
        saved(tmp_path / "c")
