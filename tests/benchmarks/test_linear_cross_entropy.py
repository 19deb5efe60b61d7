import sys
import time
from pathlib import Path

import pytest
from torch.nn import functional as F  # noqa: N812


@pytest.fixture
def script(monkeypatch, import_benchmark):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # where shapes are tiny
    linear_cross_entropy = import_benchmark("linear_cross_entropy")

    def finished(command, *, timeout):  # here instead of in a process of its own, which would import torch
        told = dict(zip(command[2::2], command[3::2], strict=True))
        log = Path(told["--out"]) / "linear_cross_entropy.jsonl"
        linear_cross_entropy.run_part(int(told["--shape"]), log=log, end=time.monotonic() + 100)
        return "a warning"

    monkeypatch.setattr(linear_cross_entropy, "finished", finished)
    return linear_cross_entropy


def run(script, monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["linear_cross_entropy.py", "--out", str(folder), *words])
    script.main()
    return script.lines_of(script.SHAPES[0], folder / "linear_cross_entropy.jsonl")


def test_every_way_tells_time_and_error(script, monkeypatch, tmp_path, capsys):
    lines = run(script, monkeypatch, tmp_path)
    assert {line["way"] for line in lines} >= {"usual, eager", "ours, auto", "ours, auto, rounded", "ours, 64"}
    for line in lines:
        precise = 1e-2 if line["way"] == "torch's own" else 1e-3  # which rounds the loss to bfloat16
        assert line["loss"] == pytest.approx(line["true_loss"], rel=precise), line
        assert max(line["error_hidden"], line["error_weight"]) < 1e-2
        assert 0 < line["fastest"] <= line["milliseconds"] <= line["slowest"]
    assert "ours, 64, rounded" in (said := capsys.readouterr().out)
    assert "GB/s" in said
    steps = script.lines_of(None, tmp_path / "linear_cross_entropy.jsonl")
    assert [line["way"] for line in steps] == ["step 300 rounded eager", "step 300 float32 eager"]
    assert all(line["gigabytes_per_second"] > 0 for line in steps)
    assert (tmp_path / "env.txt").exists()


def test_what_fails_or_comes_too_late_costs_only_itself(script, monkeypatch, tmp_path, capsys):
    def broken(hidden, weight, targets):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(script, "ways", lambda: {"broken": broken, "usual, eager": script.usual})
    lines = run(script, monkeypatch, tmp_path)
    assert [line.get("error") for line in lines] == ["RuntimeError: no kernel", None]
    assert lines[1]["milliseconds"] > 0
    monkeypatch.setattr(script, "finished", None)
    assert run(script, monkeypatch, tmp_path) == lines, "a later call has nothing to do"
    assert "is there" in capsys.readouterr().out
    run(script, monkeypatch, tmp_path / "late", "--budget", "-1")
    assert "left out: the budget is spent" in capsys.readouterr().out


def test_what_is_cut_off_keeps_what_is_known_and_is_gone_on_with(script, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as cut:
        cut.setattr(script, "timed", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(script, cut, tmp_path)
    log = tmp_path / "linear_cross_entropy.jsonl"
    before = script.lines_of(script.SHAPES[0], log)
    assert {"usual, eager", "ours, 64"} <= {line["way"] for line in before if line["error_weight"] < 1e-2}
    assert not script.is_timed(script.SHAPES[0], log)
    with log.open("a") as file:
        file.write('{"way": "us')
    lines = run(script, monkeypatch, tmp_path)
    assert all("milliseconds" in line for line in lines)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none of its own")
def test_torchs_own_is_among_them(script):
    assert "torch's own" in script.ways()
