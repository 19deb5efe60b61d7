import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the benchmark itself")


def test_a_warm_start_wants_a_cold_one_first(import_benchmark, monkeypatch, tmp_path):
    script = import_benchmark("compile_cache")
    monkeypatch.setattr(script.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(SystemExit, match="run that case before this one"):
        script.start("bf16", "warm")


@pytest.mark.slow
def test_what_the_warm_start_finds_is_what_the_cold_one_wrote(import_benchmark, tmp_path):
    path = import_benchmark("compile_cache").__file__
    words = [sys.executable, path, "--cases", "bf16, cold", "bf16, warm", "--output", str(tmp_path)]
    done = subprocess.run(
        words, env={**os.environ, "UPS_BENCH_SIZE": "tiny"}, capture_output=True, text=True, timeout=240, check=False
    )
    cold, warm = json.loads((tmp_path / "result.json").read_text())
    assert "error" not in cold, done.stdout
    assert (cold["loaded"], cold["compile"]["groups"][0]["from_cache"]) == (0, 0)
    assert warm["loaded"] == warm["saved"] == cold["saved"] > 0
    assert warm["compile"]["groups"][0]["from_cache"] == 1
    assert warm["losses"] == cold["losses"]
    assert warm["first step s"] < cold["first step s"]
