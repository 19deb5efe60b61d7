"""What NCCL's process groups read from the environment when they are made."""

import atexit
import os
from functools import cache
from pathlib import Path

from lightning.fabric.utilities.distributed import _destroy_dist_connection

__all__ = ["destroy_at_exit", "prepare_nccl"]


def prepare_nccl(*, high_priority: bool, flight_recorder: Path | None) -> dict[str, str]:
    """Set what the environment does not say yet, and return it.

    Args:
        high_priority: Let communication go before computation on the device, so that a reduction does not wait behind
            the next block's kernels.
        flight_recorder: Where each rank writes its last collectives when one hangs, in files ``rank_<rank>``; the tool
            ``torchfrtrace`` reads them.
    """
    wanted = {"TORCH_NCCL_HIGH_PRIORITY": "1"} if high_priority else {}
    if flight_recorder is not None:
        flight_recorder.mkdir(parents=True, exist_ok=True)
        prefix = str(flight_recorder / "rank_")
        wanted |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        # The names of torch 2.11 and those of before, which it still reads.
        wanted |= dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
        wanted |= dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in wanted}


@cache  # once for each process
def destroy_at_exit() -> None:
    """Close the process groups when the process ends; Lightning does where NCCL is the only backend."""
    atexit.register(_destroy_dist_connection)
