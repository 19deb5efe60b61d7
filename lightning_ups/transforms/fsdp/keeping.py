"""Keeping gathered parameters from forward to backward where memory allows, as a step has shown that it does."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import gathered_type
from lightning_ups._compat.torch.tensors.tensors import plain_memory
from lightning_ups.transforms.sharding import least_of_ranks

__all__ = ["Keeping", "choose_keeping", "gathered_bytes", "keep_gathered", "least_headroom"]

_RESERVE = 0.08  # of the device's memory, for what later steps need beyond the ones seen


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Whether gathered parameters are kept, and why.

    Args:
        keep: Whether they are.
        gathered_bytes: What they take on each device.
        reason: For the report.
    """

    keep: bool
    gathered_bytes: int
    reason: str


def choose_keeping(*, gathered: int, headroom: int | None, total: int) -> Keeping:
    """Return whether ``gathered`` bytes fit into ``headroom`` of a device with ``total`` bytes, with some to spare."""
    if headroom is None:
        return Keeping(keep=False, gathered_bytes=gathered, reason="what memory is free is not known here")
    room = headroom - int(_RESERVE * total)
    fits = gathered <= room
    reason = (
        f"{gathered / 2**30:.2f} GiB gathered {'fit' if fits else 'do not fit'} into the"
        f" {max(room, 0) / 2**30:.2f} GiB that are left beside a reserve of {_RESERVE:.0%}"
    )
    return Keeping(keep=fits, gathered_bytes=gathered, reason=reason)


def gathered_bytes(blocks: Iterable[Any], *, tensor_size: int = 1) -> int:
    """Return what the sharded parameters of ``blocks``, which have run, take on each device while all are gathered."""
    types: dict[Any, torch.dtype] = {}
    for module in {module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)}:
        types |= gathered_type(module)
    return sum(p.numel() // tensor_size * _itemsize(p, dtype) for p, dtype in types.items())


def _itemsize(parameter: DTensor, dtype: torch.dtype) -> int:
    local = parameter.to_local()
    return torch.float8_e4m3fn.itemsize if plain_memory(local) is not local else dtype.itemsize


def least_headroom(device: torch.device) -> tuple[int | None, int]:
    """Return what was still free at the highest peak, and the device's memory, each on the rank where it is least.

    Every rank takes part.
    """
    if device.type != "cuda":
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    room, total = least_of_ranks(room, total, device=device)
    return room, total


def keep_gathered(blocks: Iterable[FSDPModule], *, keep: bool) -> None:
    """Keep what each of the sharded ``blocks`` gathers in forward for its backward, from now on, or free it again."""
    for block in blocks:
        block.set_reshard_after_forward(not keep, recurse=False)
