import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plan

    yield plan
    for name in ("plan", "cases"):
        sys.modules.pop(name, None)


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
    assert len(peaks) == 10


@pytest.mark.slow
@pytest.mark.parametrize("only", ["1B eager", "1B DDP", "Llama"])
def test_it_runs_without_a_gpu(only, tmp_path):
    done = subprocess.run(
        [sys.executable, "plan.py", "--only", only, "--output", str(tmp_path / "out")],
        cwd=BENCHMARKS,
        env=os.environ | {"UPS_BENCH_SIZE": "tiny", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["planned_gib"] >= 0
    assert "phase" in result
    assert "training_s" in result
    assert "measure_error" not in result
    assert (tmp_path / "out" / "table.md").read_text().count("|") > 12
