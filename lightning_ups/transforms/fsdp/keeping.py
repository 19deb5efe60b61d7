"""Keeps gathered parameters from forward to backward if a measured step shows that memory allows it."""

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

_RESERVE = 0.08  # of the device's memory, reserved for later steps that need more


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Whether gathered parameters are kept, and why.

    Args:
        keep: Whether they are kept.
        gathered_bytes: Their size on each device.
        reason: The reason, for the report.
    """

    keep: bool
    gathered_bytes: int
    reason: str


def choose_keeping(*, gathered: int, headroom: int | None, total: int) -> Keeping:
    """Return whether ``gathered`` bytes fit into ``headroom`` of a device with ``total`` bytes, minus a reserve."""
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
    """Return the bytes that the sharded parameters of ``blocks``, which have run, take on each device when gathered."""
    types: dict[Any, torch.dtype] = {}
    for module in {module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)}:
        types |= gathered_type(module)
    return sum(p.numel() // tensor_size * _itemsize(p, dtype) for p, dtype in types.items())


def _itemsize(parameter: DTensor, dtype: torch.dtype) -> int:
    local = parameter.to_local()
    return torch.float8_e4m3fn.itemsize if plain_memory(local) is not local else dtype.itemsize


def least_headroom(device: torch.device) -> tuple[int | None, int]:
    """Return the free memory at the highest peak, and the device's memory, both the minimum across ranks.

    A collective.
    """
    if device.type != "cuda":
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    room, total = least_of_ranks(room, total, device=device)
    return room, total


def keep_gathered(blocks: Iterable[FSDPModule], *, keep: bool) -> None:
    """Keep, from now on, what each sharded block gathers in forward for its backward, or free it."""
    for block in blocks:
        block.set_reshard_after_forward(not keep, recurse=False)
