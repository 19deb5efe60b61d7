"""Reports processes that do not reach the rendezvous of a run."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["rendezvous"]

PATIENCE_S, LONGER = 20.0, 5  # each pause is five times as long as the one before
_logger = logging.getLogger(__name__)


@contextmanager
def rendezvous(environment: ClusterEnvironment, *, timeout: timedelta) -> Iterator[None]:
    """Log, on one process of each node, that the context waits for other processes, and explain its timeout.

    Args:
        environment: The cluster environment, with the number of processes and the address.
        timeout: The time after which torch gives up.

    Raises:
        RuntimeError: If the rendezvous failed.
    """
    over = threading.Event()
    if environment.local_rank() == 0 and not dist.is_initialized():
        # A daemon: torch waits in C++, and a process that is ended meanwhile must not wait for this thread.
        threading.Thread(target=_tell, args=(over, environment, timeout), daemon=True).start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RuntimeError(_why(str(error), environment, timeout)) from error
    finally:
        over.set()


def _tell(over: threading.Event, environment: ClusterEnvironment, timeout: timedelta) -> None:
    waited, pause = 0.0, PATIENCE_S
    while not over.wait(pause):
        waited, pause = waited + pause, pause * LONGER
        _logger.warning(
            f"{_process(environment)} has waited {waited:g} s for the others at {_place(environment)}."
            f" {_NEEDED} It gives up after {timeout.total_seconds() / 60:g} minutes."
        )


def _why(error: str, environment: ClusterEnvironment, timeout: timedelta) -> str:
    if "EADDRINUSE" in error:
        return (
            f"{_process(environment)} cannot use port {environment.main_port} for the rendezvous."
            " Another process of this machine uses it, perhaps of another run, or of one that has not ended."
            " End that one, or set MASTER_PORT to a free port, the same for all processes."
        )
    return (
        f"{_process(environment)} has not met the others at {_place(environment)} in"
        f" {timeout.total_seconds() / 60:g} minutes. {_NEEDED} Torch's error: {error.splitlines()[0]}"
    )


_NEEDED = (
    "Start all of them, each with its own rank and with the same address, port and number of processes."
    " All must be able to reach that address."
)


def _process(environment: ClusterEnvironment) -> str:
    return f"Process {environment.global_rank()} of {environment.world_size()}, by {type(environment).__name__},"


def _place(environment: ClusterEnvironment) -> str:
    return f"{environment.main_address}:{environment.main_port}"
