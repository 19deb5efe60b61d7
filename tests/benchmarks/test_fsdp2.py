import json
import sys

import pytest


@pytest.fixture
def fsdp2(import_benchmark):
    return import_benchmark("fsdp2")


def result(name, speed, losses):
    return {"name": name, "tokens_per_s_per_gpu": speed, "ms_per_step": 1.0, "peak_gib": 2.0, "losses": losses}


def test_the_table_has_medians_and_how_far_losses_are_apart(fsdp2):
    runs = [
        result("one", 100, [4.0, 2.0]),
        result("two", 90, [4.0, 2.02]),
        {"name": "three", "error": "x\ntorch.OutOfMemoryError: CUDA\nmore"},
        {"name": "four", "error": ""},
        result("one", 110, [4.0, 2.0]),
    ]
    shown = fsdp2._table(runs)
    assert "| one | 105 | 9.5% | 1.0 | 2.0 | 4.0000, 2.0000 | 0.0e+00 |" in shown
    assert "| two | 90 | 0.0% | 1.0 | 2.0 | 4.0000, 2.0200 | 1.0e-02 |" in shown
    assert "| three | torch.OutOfMemoryError: CUDA |" in shown
    assert "| four | no output |" in shown


def test_what_is_worth_most_comes_first_and_what_does_not_fit_is_left_out(fsdp2):
    names = [config.name for config in fsdp2._sets()["8B"]]
    assert names[:2] == ["8B ours, batch 2", "8B stock ModelParallel, by hand, batch 2"]
    assert "8B stock FSDP1, batch 1" in names
    assert "8B stock FSDP1, batch 2" not in names


def test_each_result_is_kept_at_once_and_the_budget_holds(fsdp2, monkeypatch, tmp_path, capsys):
    told = iter([json.dumps(result("tiny ours, 1 rank, batch 4", 100, [4.0, 3.0])), KeyboardInterrupt])

    def finished(command, **_):
        if (said := next(told)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return said

    monkeypatch.setattr(fsdp2, "finished", finished)
    words = ["fsdp2.py", "--set", "tiny", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        fsdp2.main()
    assert json.loads((tmp_path / "out" / "results.jsonl").read_text())["losses"] == [4.0, 3.0]
    assert "| tiny ours, 1 rank, batch 4 | 100 |" in (tmp_path / "out" / "table.md").read_text()
    monkeypatch.setattr(sys, "argv", [*words, "--budget", "10", "--rounds", "2"])
    fsdp2.main()
    assert capsys.readouterr().out.count("left out") == 2 * len(fsdp2._sets()["tiny"])


def test_what_fails_is_not_run_again_and_what_is_interrupted_is_kept(fsdp2, monkeypatch, tmp_path, capsys):
    told = iter(["no kernel", json.dumps(result("tiny ours, 2 ranks, batch 2", 9, [4.0])) + '\n{"name": "cut', None])

    def finished(command, **_):
        if (said := next(told)) is None:
            raise fsdp2.Interrupted("step 1")
        return said

    monkeypatch.setattr(fsdp2, "finished", finished)
    words = ["fsdp2.py", "--set", "tiny", "--only", "rank", "--rounds", "2", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        fsdp2.main()
    found = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(one["round"], one["name"][:14], one.get("error")) for one in found] == [
        (1, "tiny ours, 1 r", "no kernel"),
        (1, "tiny ours, 2 r", None),
        (2, "tiny ours, 2 r", "step 1\nended, since the benchmark was interrupted"),
    ]
    assert "tiny ours, 1 rank, batch 4, round 2: left out, it failed before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "8B"], "set 8B needs 4 GPUs, and this machine has 1"),
        (["--set", "parity", "--only", "4 GPUs"], "no configuration of parity has '4 GPUs' in its name: '1B ours"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(fsdp2, monkeypatch, capsys, words, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["fsdp2.py", *words])
    with pytest.raises(SystemExit, match="2"):
        fsdp2.main()
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_and_two_have_the_same_losses(run_benchmark, tmp_path):
    done = run_benchmark("fsdp2", "--set", "tiny", "--only", "rank", "--output", "out")
    one, two = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-4), done.stderr
    assert len(one["losses"]) == 6
    assert one["losses"][-1] < one["losses"][0]
    assert "losses off by" in done.stdout
