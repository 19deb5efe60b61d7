import json
import sys
from pathlib import Path

import pytest
from torch.nn import functional as F  # noqa: N812


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # where shapes are tiny
    import linear_cross_entropy

    yield linear_cross_entropy
    for name in ("linear_cross_entropy", "cases", "processes"):
        sys.modules.pop(name, None)


def run(script, monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["linear_cross_entropy.py", "--out", str(folder), *words])
    script.main()
    return [json.loads(line) for line in (folder / "linear_cross_entropy.jsonl").read_text().splitlines()]


def test_every_way_tells_time_and_error(script, monkeypatch, tmp_path, capsys):
    lines = run(script, monkeypatch, tmp_path)
    assert {line["way"] for line in lines} >= {"usual, eager", "ours, chunk auto", "ours, chunk 64"}
    for line in lines:
        precise = 1e-2 if line["way"] == "torch's own" else 1e-3  # which rounds the loss to bfloat16
        assert line["loss"] == pytest.approx(line["true_loss"], rel=precise), line
        assert max(line["error_hidden"], line["error_weight"]) < 1e-2
        assert 0 < line["fastest"] <= line["milliseconds"] <= line["slowest"]
    assert "chunk 64" in capsys.readouterr().out
    assert (tmp_path / "env.txt").exists()


def test_what_fails_or_comes_too_late_costs_only_itself(script, monkeypatch, tmp_path):
    def broken(hidden, weight, targets):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(script, "ways", lambda: {"broken": broken, "usual, eager": script.usual})
    lines = run(script, monkeypatch, tmp_path)
    assert [line.get("error") for line in lines] == ["RuntimeError: no kernel", None]
    lines = run(script, monkeypatch, tmp_path, "--budget", "-1")
    assert [line["error"] for line in lines] == ["left out: the budget is spent"] * 2


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none of its own")
def test_torchs_own_is_among_them(script):
    assert "torch's own" in script.ways()
