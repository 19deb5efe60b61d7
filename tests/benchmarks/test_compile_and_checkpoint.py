import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_recomputing_saves_less_and_changes_no_loss(tmp_path):
    cases = ["eager", "eager + nothing", "compile model"]
    done = subprocess.run(
        [sys.executable, "compile_and_checkpoint.py", "--cases", *cases, "--output", str(tmp_path / "out")],
        cwd=BENCHMARKS,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS.parent), "UPS_BENCH_SIZE": "tiny"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = {one["case"]: one for one in json.loads((tmp_path / "out" / "result.json").read_text())}
    assert [*found] == cases, done.stderr
    assert found["eager + nothing"]["backward_tflop"] >= found["eager"]["backward_tflop"]
    assert found["eager + nothing"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-6)
    assert found["compile model"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-2)
    assert found["compile model"]["report"]["Compile"]["lines"]
