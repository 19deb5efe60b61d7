"""Importing and running the scripts of ``benchmarks/``, which are no package."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def import_benchmark(monkeypatch):
    """Import a script by its name, afresh; it, and what it imports from beside it, is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    _forget()  # scripts read the environment when they are imported
    yield importlib.import_module
    _forget()


def _forget():
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(BENCHMARKS):
            del sys.modules[name]
    gc.collect()  # their classes, which the command line would list among all subclasses


@pytest.fixture
def run_benchmark(tmp_path):
    """Run a script by its name on the CPU, in a process of its own in the test's folder; return how it ended."""

    def run(name, *words, **environment):
        path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / f"{name}.py"), *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
