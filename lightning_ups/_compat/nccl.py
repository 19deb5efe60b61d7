"""What NCCL's process groups read from the environment when they are made."""

import atexit
import os
from functools import cache
from pathlib import Path

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection

__all__ = ["destroy_at_exit", "prepare_nccl"]


def prepare_nccl(
    *,
    high_priority: bool,
    flight_recorder: Path | None,
    multiprocessors: int | None = None,
    copy_engines: bool = False,
) -> dict[str, str]:
    """Set what the environment does not say yet, and return it.

    Args:
        high_priority: Let communication go before computation on the device, so that a reduction does not wait behind
            the next block's kernels.
        flight_recorder: Where each rank writes its last collectives when one hangs, in files ``rank_<rank>``; the tool
            ``torchfrtrace`` reads them.
        multiprocessors: How many a collective may take at most. None: as many as NCCL finds fastest.
        copy_engines: Let what can be copied be copied without any.

    Raises:
        ValueError: If one of the last two would have no effect, since the environment says something else, or since
            groups of processes were made before.
    """
    wanted = {"TORCH_NCCL_HIGH_PRIORITY": "1"} if high_priority else {}
    if flight_recorder is not None:
        flight_recorder.mkdir(parents=True, exist_ok=True)
        prefix = str(flight_recorder / "rank_")
        wanted |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        # The names of torch 2.11 and those of before, which it still reads.
        wanted |= dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
        wanted |= dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix)
    asked = {} if multiprocessors is None else {"NCCL_MAX_CTAS": str(multiprocessors)}
    if copy_engines:
        asked["NCCL_CTA_POLICY"] = "2"
    for name, value in asked.items():
        _check_effect(name, value)
    wanted |= asked
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in wanted}


def _check_effect(name: str, value: str) -> None:
    said = os.environ.get(name)
    if said is None and dist.is_initialized():
        raise ValueError(
            f"NCCL would not see {name}={value}, which the strategy's options ask for."
            " It reads it when groups of processes are made, and this process has some already."
            f" Set {name}={value} in the environment of the process, or make no group before the Trainer does."
        )
    if said not in (None, value):
        raise ValueError(
            f"The environment says {name}={said}, and the strategy's options ask for {value}."
            " What the environment says stays, so the option would have no effect."
            f" Unset {name}, or leave the option out."
        )


@cache  # once for each process
def destroy_at_exit() -> None:
    """Close the process groups when the process ends; Lightning does where NCCL is the only backend."""
    atexit.register(_destroy_dist_connection)
