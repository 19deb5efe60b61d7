import json
import sys

import pytest

SIZES = ("--steps", "20", "--width", "16", "--rows", "16", "--device", "cpu", "--slower", "300")


@pytest.fixture
def judged(tmp_path):
    """Read what was written about one pair of each kind."""

    def judged(order):
        slower, equal = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
        assert (slower["kind"], equal["kind"]) == ("slower", "equal")
        assert slower["order"] == equal["order"] == order
        assert slower["low"] < slower["difference"] < slower["high"]
        assert slower["difference"] > 1
        return slower, equal

    return judged


def test_runs_that_take_turns(import_benchmark, judged, tmp_path, monkeypatch, capsys):
    words = (*SIZES, "--pairs", "1", "--order", "interleaved", "--output", str(tmp_path / "pairs.jsonl"))
    monkeypatch.setattr(sys, "argv", ["compare_pairs.py", *words])
    import_benchmark("compare_pairs").main()
    judged("interleaved")
    *_, found, alarms = capsys.readouterr().out.splitlines()
    assert found.startswith("slowdowns found: ")
    assert alarms.startswith("false alarms: ")


@pytest.mark.slow
def test_each_run_in_a_process_of_its_own(run_benchmark, judged):
    done = run_benchmark("compare_pairs", *SIZES, "--pairs", "1", "--output", "pairs.jsonl")
    assert done.returncode == 0, done.stderr
    judged("sequential")
