import logging
import math
import socket
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from lightning_ups.strategies import Communication, FSDP2Strategy, SimpleFSDPStrategy, processes
from lightning_ups.strategies.processes import rendezvous
from tests.toys import Net, loader, outside_a_group
from tests.toys import trainer as toy_trainer

LOGGER = "lightning_ups.strategies.processes"


@pytest.fixture
def port(monkeypatch):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}
    for name, value in {**variables, "NODE_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    return port


@pytest.fixture
def environment(port):
    environment = LightningEnvironment()
    environment.set_world_size(2)
    return environment


def test_a_wait_is_logged_after_longer_and_longer_pauses(environment, port, monkeypatch, caplog):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.1)
    with caplog.at_level(logging.WARNING, LOGGER), rendezvous(environment, timeout=timedelta(minutes=30)):
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, second = caplog.messages
    assert first.startswith("Process 0 of 2, by LightningEnvironment, has waited 0.1 s for the others at 127.0.0.1:")
    assert f":{port}. Start all of them (under SLURM by `srun python train.py`)" in first
    assert first.endswith("It gives up after 30 minutes.")
    assert "has waited 0.6 s" in second


@pytest.mark.parametrize(("started", "is_said"), [(1, True), (0, False)])  # 0: on the other node
def test_processes_that_this_one_has_started_are_still_starting(environment, monkeypatch, caplog, started, is_said):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.05)
    launcher = SimpleNamespace(procs=[None] * started)
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        rendezvous(environment, timeout=timedelta(minutes=30), launcher=launcher),
    ):
        time.sleep(0.2)
    assert ("This process has started them" in caplog.messages[0]) is is_said
    assert ("srun" in caplog.messages[0]) is not is_said


def test_torchrun_has_started_all(port, monkeypatch, caplog):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.05)
    elastic = TorchElasticEnvironment()
    with caplog.at_level(logging.WARNING, LOGGER), rendezvous(elastic, timeout=timedelta(minutes=30)):
        time.sleep(0.2)
    assert "torchrun has started them" in caplog.messages[0]


def test_nothing_is_logged_without_a_wait(environment, monkeypatch, caplog):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.05)
    with caplog.at_level(logging.WARNING, LOGGER):
        with rendezvous(environment, timeout=timedelta(minutes=30)):
            pass
        monkeypatch.setenv("LOCAL_RANK", "1")
        with rendezvous(environment, timeout=timedelta(minutes=30)):  # beside one that says it
            time.sleep(0.2)
        time.sleep(0.1)
    assert not caplog.messages


def test_a_port_in_use_is_an_error(environment, port):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with (
            pytest.raises(RuntimeError, match=f"cannot use port {port}.*set MASTER_PORT to a free port"),
            rendezvous(environment, timeout=timedelta(seconds=5)),
        ):
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=5))


def test_processes_that_were_started_end_with_a_failed_rendezvous(tmp_path):
    script = """
import os, socket
import lightning_ups
from lightning.pytorch import Trainer
from tests.toys import Net, loader

print("PID", os.getpid(), flush=True)
taken = socket.socket()
if "LOCAL_RANK" not in os.environ:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
Trainer(accelerator="cpu", devices=2, strategy="fsdp2", logger=False, enable_checkpointing=False).fit(Net(), loader())
"""
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py"],
        cwd=tmp_path,
        env={**outside_a_group(), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,  # until the last process has closed its ends
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "cannot use port" in done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [FSDP2Strategy, SimpleFSDPStrategy])
def test_a_strategy_reports_missing_processes(port, kind):
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kind(communication=Communication(timeout_minutes=0.02)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    told = rf"Process 0 of 2, .* has not met the others at 127.0.0.1:{port} in 0.02 minutes.*Torch's error: Timed out"
    with pytest.raises(RuntimeError, match=told):
        trainer.fit(Net(), loader())
    assert not dist.is_initialized()


def test_other_errors_are_left_alone(environment):
    with pytest.raises(ZeroDivisionError), rendezvous(environment, timeout=timedelta(minutes=30)):
        _ = 1 / 0


@pytest.mark.parametrize("options", [{"timeout_minutes": 0}, {"timeout_minutes": math.inf}, {"multiprocessors": 0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=rf"Communication\({next(iter(options))}=.*is out of range"):
        Communication(**options)


@pytest.mark.parametrize("options", [{"multiprocessors": 8}, {"flight_recorder": "hangs"}])
def test_options_of_nccl_are_refused_where_gloo_communicates(tmp_path, options):
    strategy = FSDP2Strategy(communication=Communication(**options))
    with pytest.raises(ValueError, match=r"has no effect.*gloo communicates.*Leave them out"):
        toy_trainer(tmp_path, strategy=strategy).fit(Net(), loader())


BOTH = (FSDP2Strategy, SimpleFSDPStrategy)


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("tasks", "nodes", "options", "cure"),
    [
        (2, 1, {"devices": 1}, r"started 2 processes.*needs 1: .*product is 2"),
        (1, 1, {"devices": 2}, r"started 1 processes.*needs 2: .*product is 1"),
        (2, 1, {"devices": 2, "num_nodes": 2}, r"needs 4: .*product is 2"),
        (2, 2, {"devices": 2}, "devices=1"),  # in Lightning's words
    ],
)
def test_processes_that_srun_started_are_those_that_the_trainer_asks_for(
    tmp_path, monkeypatch, strategy, tasks, nodes, options, cure
):
    slurm = {"NTASKS": tasks, "NTASKS_PER_NODE": tasks // nodes, "NNODES": nodes, "JOB_ID": 7, "JOB_NAME": "train"}
    last = {"PROCID": tasks - 1, "LOCALID": tasks // nodes - 1, "NODEID": nodes - 1}
    for name, value in {**slurm, **last}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # the Trainer changes it
    with pytest.raises(ValueError, match=cure):
        toy_trainer(tmp_path, strategy=strategy(), **options).fit(Net(), loader())
