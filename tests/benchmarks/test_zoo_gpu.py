"""Runs that share a GPU: one at a time executes, and none waits for one that has died."""

import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
import torch
from zoo_gpu import SharedGpu

folder, name = Path(sys.argv[1]), sys.argv[2]
gpu = SharedGpu(folder)

def execute(ticks):
    for _ in range(ticks):
        with (folder / "ticks").open("a") as ticked:
            ticked.write(name + "\\n")
        time.sleep(0.02)

def wait(frame, inputs):
    time.sleep(1)  # as a compiler does
    return frame.forward

with gpu.shared():
    torch.compile(lambda x: x + 1, backend=wait)(torch.ones(2))
    gpu.take_long()
    execute(30 if name != "dies" else 100_000)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def run(name):
        words = [sys.executable, "-c", RUN, str(tmp_path), name]
        started.append(subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def ticks(folder):
    return (folder / "ticks").read_text().split()


@pytest.mark.slow
def test_one_run_executes_at_a_time_while_others_compile(start, tmp_path):
    runs = [start(name) for name in "abc"]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    turns = [(name, len([*group])) for name, group in groupby(ticks(tmp_path))]
    assert sorted(turns) == [("a", 30), ("b", 30), ("c", 30)]
    assert not [*tmp_path.glob("[0-9]*")]


@pytest.mark.slow
def test_a_run_that_is_killed_holds_nobody_up(start, tmp_path, import_benchmark):
    dying = start("dies")
    while not (tmp_path / "ticks").exists():
        time.sleep(0.05)
    (tmp_path / "ticks").unlink()
    other = start("b")
    time.sleep(3)
    assert {*ticks(tmp_path)} == {"dies"}
    dying.kill()
    dying.wait()
    import_benchmark("zoo_gpu").settle(tmp_path)
    assert other.wait(60) == 0
    assert ticks(tmp_path)[-30:] == ["b"] * 30
