import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def plan(import_benchmark):
    return import_benchmark("plan")


def test_twelve_configurations_that_differ(plan):
    assert len(plan.CONFIGURATIONS) == 12
    assert len({config.name for config in plan.CONFIGURATIONS}) == 12
    assert sum(config.devices > 1 for config in plan.CONFIGURATIONS) == 3


def test_the_table(plan):
    rows = [
        {"name": "a", "planned_gib": 11.0, "measured_gib": 10.0, "tuned": False},
        {"name": "b", "measured_gib": 10.0, "tuned": True},
    ]
    table = plan._table(rows).splitlines()
    assert table[2] == "| a | 11.0 | 10.0 | +10.00% | no |"
    assert table[3] == "| b | failed | 10.0 | - | yes |"


def test_the_recorded_peaks(plan):
    peaks = {name: peak for name, (_, peak) in plan.recorded().items()}
    assert peaks["eager"] == 67.0
    assert peaks["llama 8B"] == 122.58
    assert peaks["fsdp2 1B ours, gradients, 2 GPUs, batch 2"] == 33.87
    assert peaks["1B, 2 GPUs, SimpleFSDP"] == 35.55
    assert peaks["llama 150M-32"] == 14.31
    assert peaks["fsdp2 8B ours, batch 2"] == 125.23
    assert peaks["1B, 2 GPUs, FSDP2, blocks compiled"] == 52.93
    assert peaks["8B, optimizer offload"] == 48.73
    assert peaks["67 blocks, both kinds of offload"] == 136.33
    assert len(peaks) == 27


def test_the_page_has_the_recorded_peaks(plan):
    page = (BENCHMARKS.parent / "docs" / "guides" / "plan.md").read_text()
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([-+][\d.]+%) \| (yes|no) \|$", page, flags=re.MULTILINE)
    assert f"plans {len(plan.recorded())} GPTs" in page
    assert f"{len(plan.recorded()) - len(rows)} are within 0.4 %" in page
    for name, planned, measured, error, seen in rows:
        assert float(measured) == plan.recorded()[name][1]
        assert error == f"{float(planned) / float(measured) - 1:+.2%}"
        assert (seen == "yes") == (name in plan.TUNED)


@pytest.mark.parametrize(
    ("words", "size", "said"),
    [
        (["--only", "1C"], "tiny", "no configuration has '1C' in its name: 1B eager"),
        ([], "1B", "UPS_BENCH_SIZE=1B is not known: it is tiny, or not set"),
        (["--only", "Llama"], "tiny", "Llama needs transformers, which cannot be loaded (RuntimeError: another CUDA)"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(plan, monkeypatch, tmp_path, capsys, words, size, said):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('another CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setenv("UPS_BENCH_SIZE", size)
    monkeypatch.setattr(sys, "argv", ["plan.py", *words])
    with pytest.raises(SystemExit, match="2"):
        plan.main()
    assert said in capsys.readouterr().err


def test_a_run_that_is_interrupted_ends_the_plan_beside_it(plan, monkeypatch, tmp_path, capsys):
    def finished(command, *, stop, **_):
        if "measure" in command:
            raise plan.Interrupted("step 1")
        assert stop.wait(60), "the plan goes on"
        return 'RESULT {"planned_gib": 2.0}'

    monkeypatch.setattr(plan, "finished", finished)
    monkeypatch.setenv("UPS_BENCH_SIZE", "tiny")
    monkeypatch.setattr(sys, "argv", ["plan.py", "--only", "1B eager", "--output", str(tmp_path / "out")])
    with pytest.raises(KeyboardInterrupt):
        plan.main()
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["planned_gib"] == 2.0
    assert "interrupted" in result["measure_error"]
    assert "===== 1B eager, measure\nstep 1\n" in (tmp_path / "out" / "log.txt").read_text()
    assert "| 1B eager | 2.0 | - |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("only", ["1B eager", "1B DDP", "Llama"])
def test_it_runs_without_a_gpu(run_benchmark, only, tmp_path):
    done = run_benchmark("plan", "--only", only, "--output", "out", UPS_BENCH_SIZE="tiny")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["planned_gib"] >= 0
    assert "phase" in result
    assert "training_s" in result
    assert "measure_error" not in result
    assert (tmp_path / "out" / "table.md").read_text().count("|") > 12
