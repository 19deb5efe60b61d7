"""Process groups: NCCL's settings in the environment, the world's store, and forks."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_MULTIPROCESSORS = "NCCL_MAX_CTAS"
_INHERITED: list[Any] = []  # never released: the destructor would wait for threads that a fork does not copy


def prepare_nccl(
    *,
    high_priority: bool,
    flight_recorder: Path | None,
    multiprocessors: int | None = None,
) -> dict[str, str]:
    """Set environment variables that are not set yet, and return them.

    Args:
        high_priority: Run communication with priority on the device, so that a reduction does not wait for the next
            block's kernels.
        flight_recorder: Where each rank writes its last collectives if one hangs, in files ``rank_<rank>``, for the
            tool ``torchfrtrace``.
        multiprocessors: The maximum number that a collective may use. None: NCCL's default.

    Raises:
        ValueError: If ``multiprocessors`` would have no effect.
    """
    wanted = {"TORCH_NCCL_HIGH_PRIORITY": "1"} if high_priority else {}
    if multiprocessors is not None:
        _check_effect(_MULTIPROCESSORS, str(multiprocessors))
        wanted[_MULTIPROCESSORS] = str(multiprocessors)
    if flight_recorder is not None:
        flight_recorder.mkdir(parents=True, exist_ok=True)
        wanted |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        wanted |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": str(flight_recorder / "rank_")}
    for name, value in wanted.items():
        if name not in os.environ:
            os.environ[name] = value
    return {name: os.environ[name] for name in wanted}


def _check_effect(name: str, value: str) -> None:
    found = os.environ.get(name)
    if found == value or (found is None and not dist.is_initialized()):
        return
    why = "process groups exist already" if found is None else f"the environment has {name}={found}"
    raise ValueError(
        f"Communication(multiprocessors={value}) would have no effect, because {why}."
        f" NCCL reads {name} once, when the first group of a process is made."
        f" Start a new process with {name}={value}, or leave the option out."
    )


def shared_store(prefix: str) -> dist.Store:
    """Return the world's store, with ``prefix`` added to keys."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


@cache
def forget_in_forks() -> None:
    """Let each process that is forked from this one create its own groups: those of this one would hang there."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    if dist.is_initialized():
        _INHERITED.extend((distributed_c10d._world, dist.group.WORLD))
        distributed_c10d._world = distributed_c10d._World()
        distributed_c10d._update_default_pg(None)
