"""SIGKILL in every phase of a save: another process saves, and this one kills it and looks at what is left."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_ups.state.checkpoint import SavedWeights, Saver, folder, is_complete, newest

PHASES = ["staging", "writing", "written", "marking", "removing", "done"]


def save_until_killed(path, asynchronous):
    """Save again and again; each weight holds the number of its save. ``state`` is of some megabytes."""
    log = os.open(path / "phases", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    saver = Saver(asynchronous=asynchronous, observe=lambda phase, at: os.write(log, f"{phase} {at.name}\n".encode()))
    previous = None
    for number in range(1000):
        state = {"state_dict": {f"w{i}": torch.full((100_000,), float(number)) for i in range(20)}}
        saver.save(state, files={"meta.pt": b"meta"}, path=path / f"step={number}", facts={"number": number})
        if previous is not None:
            saver.remove(previous)
        previous = path / f"step={number}"
        saver.save(state, files={"meta.pt": b"meta"}, path=path / "last", facts={"number": number})


@pytest.fixture(scope="module")
def processes():
    """Forks of a small server that has imported this file: at once as a fork, without the threads of the tests here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def killed_in(phase, path, processes, *, asynchronous, delay):
    child = processes.Process(target=save_until_killed, args=(path, asynchronous), daemon=True)
    child.start()
    try:
        deadline = time.monotonic() + 60
        while (seen := phases(path)).count(phase) < 3 and time.monotonic() < deadline and child.is_alive():
            time.sleep(0.0002)
        time.sleep(delay)
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL, "it was killed, and did not end by itself"
    assert seen.count(phase) >= 3


def phases(path):
    log = path / "phases"
    return [line.partition(" ")[0] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_whole_one_is_left_whatever_the_phase(tmp_path, processes, phase, asynchronous):
    generator = random.Random(phase)
    for attempt in range(2):
        path = tmp_path / str(attempt)
        path.mkdir()
        killed_in(phase, path, processes, asynchronous=asynchronous, delay=generator.uniform(0, 0.02))
        found = newest(path)
        assert found is not None
        weights = SavedWeights(found)
        assert len({value for name in weights for value in weights[name].unique().tolist()}) == 1, "of one save"
        saves = phases(path).count("done")
        assert weights["w0"][0] >= saves // 2 - 1, "the newest"
        last = folder.located(path / "last")
        assert last is not None
        assert is_complete(last)
        saver = Saver(asynchronous=False)
        saver.save({"state_dict": {}}, files={"meta.pt": b""}, path=path / "last")
        assert newest(path) == path / "last", "and saving goes on"


@pytest.mark.slow
def test_a_training_run_of_many_lives(tmp_path):
    script = Path(__file__).parents[3] / "benchmarks" / "checkpoint_kills.py"
    command = [sys.executable, script, "--kills", "3", "--width", "128", "--no-full-disk", "--output", tmp_path]
    subprocess.run([str(word) for word in command], check=True, timeout=280)
    assert json.loads((tmp_path / "result.json").read_text())["summary"]["ok"]
