import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_both_ways_save_and_resume(tmp_path):
    kept = tmp_path / "checkpoints"
    kept.mkdir()
    words = ["--size", "tiny", "--seq", "32", "--accelerator", "cpu", "--folder", str(kept)]
    done = subprocess.run(
        [sys.executable, "checkpoint_blocking.py", "--output", str(tmp_path / "out"), *words],
        cwd=BENCHMARKS,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [one["way"] for one in found] == ["sync", "async"], done.stderr
    for one in found:
        assert len(one["saves"]) == 3
        assert all(save["blocked_s"] > 0 and save["waited_s"] >= 0 for save in one["saves"])
        assert one["resumed_steps"] == 8
        assert one["largest_relative_difference_of_losses"] == 0
        assert one["checkpoint_gigabytes"] >= 0
    assert not [*kept.iterdir()], "nothing stays behind"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"env.txt", "log.txt", "result.json"}
    assert str(tmp_path) not in (tmp_path / "out" / "env.txt").read_text()
