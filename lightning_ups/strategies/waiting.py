"""The processes of a run coming together: for whom one waits, and why they do not meet."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["come_together"]

PATIENCE_S, LONGER = 20.0, 5  # the next time after five times as long
_logger = logging.getLogger(__name__)


@contextmanager
def come_together(environment: ClusterEnvironment, *, timeout: timedelta) -> Iterator[None]:
    """Tell, on one process of each node, of a context in which the others do not come, and of one that fails for it.

    Args:
        environment: Which says how many there are, and where they meet.
        timeout: After which torch gives up.

    Raises:
        RuntimeError: If they have not met.
    """
    over = threading.Event()
    if environment.local_rank() == 0 and not dist.is_initialized():
        # A daemon: torch waits in C++, and whoever ends this process meanwhile is not to wait for the next line.
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
            f"{_process(environment)} cannot have port {environment.main_port}, at which the others would meet it."
            " Another process of this machine has it, perhaps of another run, or of one that has not ended."
            " End that one, or set MASTER_PORT to a free port, the same for all processes."
        )
    return (
        f"{_process(environment)} has not met the others at {_place(environment)} in"
        f" {timeout.total_seconds() / 60:g} minutes. {_NEEDED} What torch says: {error.splitlines()[0]}"
    )


_NEEDED = (
    "All have to be started, each with a rank of its own and with the same address, port and number of processes,"
    " and reach that address."
)


def _process(environment: ClusterEnvironment) -> str:
    return f"Process {environment.global_rank()} of {environment.world_size()}, by {type(environment).__name__},"


def _place(environment: ClusterEnvironment) -> str:
    return f"{environment.main_address}:{environment.main_port}"
