import json
import os
import signal
import statistics
import subprocess
import sys

import pytest


@pytest.fixture
def throughput(import_benchmark):
    return import_benchmark("throughput")


def test_the_interval_is_students(throughput):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    mean, half = throughput.interval(values)
    assert mean == 3.0
    assert half == pytest.approx(2.776 * statistics.stdev(values) / 5**0.5, rel=0.08)  # t of four degrees of freedom
    assert throughput.interval([1.0])[1] == float("inf")


def test_blocks_are_switched_in_pairs(throughput):
    class Callback:
        def __init__(self):
            self.said = []

        def pause(self, trainer):
            self.said.append(("off", trainer.global_step))

        def resume(self, trainer):
            self.said.append(("on", trainer.global_step))

    class Trainer:
        global_step = 0

    callback, trainer = Callback(), Trainer()
    toggle = throughput.Toggle(callback)
    for step in range(1, throughput.WARM + 8 * throughput.BLOCK + 1):
        trainer.global_step = step
        toggle.on_train_batch_end(trainer, None, None, None, 0)
    first, block = throughput.WARM, throughput.BLOCK
    assert callback.said == [
        ("off", first),
        ("on", first + block),
        ("off", first + 3 * block),
        ("on", first + 5 * block),
        ("off", first + 7 * block),
    ]
    assert [len(toggle.blocks[on]) for on in (True, False)] == [4, 4]


def test_one_gpu_is_two_machines_to_an_exchange(throughput, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")  # is put back
    monkeypatch.delenv("NODE_RANK")
    code = "import os, time; print(os.environ['NODE_RANK'], os.environ['NCCL_HOSTID'], flush=True); time.sleep(60)"
    begun, start = [], subprocess.Popen

    def popen(command, *, stdout, env):
        begun.append(start([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with throughput.other_machine():
        assert (os.environ["NODE_RANK"], os.environ["NCCL_HOSTID"]) == ("0", "0")
        assert begun[0].stdout.readline() == "1 1\n"
        with throughput.other_machine():  # as in the other process
            assert len(begun) == 1
    assert begun[0].wait(timeout=10) == -signal.SIGTERM


@pytest.mark.slow
def test_every_case_runs_on_a_cpu(run_benchmark, tmp_path):
    done = run_benchmark("throughput", "--output", "out")
    found = {case["case"]: case for case in json.loads((tmp_path / "out" / "result.json").read_text())}
    assert not [case for case in found.values() if "error" in case], done.stdout + done.stderr
    assert found["trouble loader"]["right"]
    assert abs(found["stopwatch 150M"]["off_by_percent"]) < 20
    assert found["cost small"]["pairs"] == 2
    assert len(found["look small"]["before_s"]) == len(found["look small"]["after_s"]) == 2
    assert found["trouble exchange"] == found["trouble exchange"] | {"skipped": "needs a GPU"}
