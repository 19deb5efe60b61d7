"""The processes of a run: how they communicate, and errors and log lines if some of them are missing."""

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_ups._compat.torch.fsdp.process_groups import forget_in_forks, prepare_nccl
from lightning_ups.order.arguments import check_finite, check_least

PATIENCE_S, LONGER = 20.0, 5  # each pause is five times as long as the one before
_YEAR = 60 * 24 * 365  # minutes
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How the ranks of a strategy communicate.

    Args:
        timeout_minutes: A collective that takes longer is an error.
        multiprocessors: The maximum number of a GPU's multiprocessors that a collective may use. None: NCCL's default.
        flight_recorder: A folder for a record of each rank's last collectives, written if one hangs. None: no record.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range.
    """

    timeout_minutes: float = 30
    multiprocessors: int | None = None
    flight_recorder: str | Path | None = None

    def __post_init__(self) -> None:
        of = "Communication"
        check_finite("timeout_minutes", self.timeout_minutes, of=of, why="It is a time.", above=0, most=_YEAR)
        why = "Collectives need one."
        check_least("multiprocessors", self.multiprocessors, 1, of=of, why=why, optional=True)

    @property
    def timeout(self) -> timedelta:
        """The time after which a collective is an error."""
        return timedelta(minutes=self.timeout_minutes)

    def prepare(self, device: torch.device) -> None:
        """Set NCCL's options, before the first process group is created.

        Raises:
            ValueError: If an option would have no effect.
        """
        if device.type == "cuda":
            folder = None if self.flight_recorder is None else Path(self.flight_recorder)
            prepare_nccl(high_priority=True, flight_recorder=folder, multiprocessors=self.multiprocessors)
        elif self.multiprocessors is not None or self.flight_recorder is not None:
            raise ValueError(
                f"{self} has no effect: multiprocessors and flight_recorder are options of NCCL, and gloo communicates"
                " here. Leave them out."
            )


def check_processes(environment: ClusterEnvironment, *, devices: int, num_nodes: int) -> None:
    """Raise, in each process, if the number of processes is wrong: they would wait for missing ones."""
    wanted = num_nodes * devices
    if (started := environment.world_size()) != wanted:
        raise ValueError(
            f"{type(environment).__name__} started {started} processes, and Trainer(devices={devices},"
            f" num_nodes={num_nodes}) needs {wanted}: one for each device, which sees all devices of its node."
            f" Start {wanted}, or give devices and num_nodes whose product is {started}. With srun, use"
            " --gpus-per-node and not --gpus-per-task."
        )
    environment.validate_settings(num_devices=devices, num_nodes=num_nodes)


def refuse_notebook(strategy: str, count: int) -> None:
    """Raise if ``count`` processes would have to be started from a notebook."""
    if count > 1:
        raise ValueError(
            f"{strategy} cannot start {count} processes from a notebook; one device works there."
            " Collect imports (lightning_ups among them), model, data and Trainer in one cell whose first line is:"
            " %%writefile train.py"
            f"\nThen run it in the next cell:\n!{shlex.quote(sys.executable)} train.py"
        )


@contextmanager
def rendezvous(environment: ClusterEnvironment, *, timeout: timedelta, launcher: Any = None) -> Iterator[None]:
    """Log, on one process of each node, that the context waits for other processes, and explain its timeout.

    A process alone, such as a notebook, leaves no address and port in the environment, which scripts that it starts
    would inherit, and no process group in forks, such as those of Lightning's ``ddp_notebook``.

    Args:
        environment: The cluster environment, with the number of processes and the address.
        timeout: The time after which torch gives up.
        launcher: Lightning's, which kills the processes that it started if the rendezvous fails; they would wait on.

    Raises:
        RuntimeError: If the rendezvous failed.
    """
    over = threading.Event()
    is_alone = environment.world_size() == 1 and "LOCAL_RANK" not in os.environ
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")} if is_alone else {}
    if is_alone and hasattr(os, "register_at_fork"):  # not on Windows
        forget_in_forks()
    if environment.local_rank() == 0 and not dist.is_initialized():
        # A daemon: torch waits in C++, and a process that is ended meanwhile must not wait for this thread.
        args = (over, environment, timeout, launcher)
        threading.Thread(target=_report_waiting, args=args, daemon=True).start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if launcher is not None:
            launcher.kill(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        raise RuntimeError(_failed(str(error), environment, timeout, launcher)) from error
    finally:
        over.set()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _report_waiting(over: threading.Event, environment: ClusterEnvironment, timeout: timedelta, launcher: Any) -> None:
    waited, pause = 0.0, PATIENCE_S
    while not over.wait(pause):
        waited, pause = waited + pause, pause * LONGER
        _logger.warning(
            f"{_process(environment)} has waited {waited:g} s for the others at {_address(environment)}."
            f" {_needed(environment, launcher)} It gives up after {timeout.total_seconds() / 60:g} minutes."
        )


def _failed(error: str, environment: ClusterEnvironment, timeout: timedelta, launcher: Any) -> str:
    if "EADDRINUSE" in error:
        return (
            f"{_process(environment)} cannot use port {environment.main_port} for the rendezvous, because another"
            " process uses it. End that process, or set MASTER_PORT to a free port, the same for all processes."
            " If a process that trains has started this one, do not let it inherit MASTER_ADDR, MASTER_PORT, LOCAL_RANK"
            " and NODE_RANK."
        )
    return (
        f"{_process(environment)} has not met the others at {_address(environment)} in"
        f" {timeout.total_seconds() / 60:g} minutes. {_needed(environment, launcher)}"
        f" Torch's error: {error.splitlines()[0]}"
    )


def _needed(environment: ClusterEnvironment, launcher: Any) -> str:
    """Return what to do about processes that are missing, if `launcher` or torchrun has not started all of them."""
    started = len(getattr(launcher, "procs", ())) + 1
    if started == environment.world_size() or isinstance(environment, TorchElasticEnvironment):
        by = "torchrun" if isinstance(environment, TorchElasticEnvironment) else "This process"
        return f"{by} has started them. They are still importing or building the model, or their error stands above."
    return (
        "Start all of them (under SLURM by `srun python train.py`), each with its own rank and with the same address,"
        " port and number of processes. All must be able to reach that address."
    )


def _process(environment: ClusterEnvironment) -> str:
    return f"Process {environment.global_rank()} of {environment.world_size()}, by {type(environment).__name__},"


def _address(environment: ClusterEnvironment) -> str:
    return f"{environment.main_address}:{environment.main_port}"
