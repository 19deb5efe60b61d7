"""Decides by the free memory when gradients are reduced, and whether gathered parameters are kept for backward."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import gathered_type
from lightning_ups._compat.torch.tensors.tensors import plain_memory
from lightning_ups.transforms.sharding import least_of_ranks

Sync = Literal["auto", "last", "every"]

_SHARE = 0.25  # of the free memory after sharding; the rest is for activations and the optimizer
_RESERVE = 0.08  # of the device's memory, reserved for later steps that need more

# Gradients


def choose_sync(
    sync: Sync, *, gradient_bytes: int, free_bytes: int | None, looked_at_by: Sequence[str] = ()
) -> tuple[Literal["last", "every"], str]:
    """Return ``sync``, or for ``"auto"`` the choice with the fewest reductions that fits into memory; and why.

    Args:
        sync: The user's choice.
        gradient_bytes: The bytes that ``"last"`` keeps on each device between microbatches.
        free_bytes: Free memory of the device; None: unknown.
        looked_at_by: Hooks that read gradients after each microbatch, which requires a reduction each time.
    """
    if sync != "auto":
        return sync, "as asked"
    if looked_at_by:
        return "every", f"{', '.join(looked_at_by)} may read or write gradients"
    if free_bytes is None:
        return "last", "the free memory is not known"
    fits = gradient_bytes <= _SHARE * free_bytes
    compared = f"{gradient_bytes / 2**30:.2f} GiB of whole gradients {'fit' if fits else 'do not fit'}"
    return "last" if fits else "every", f"{compared} into a quarter of {free_bytes / 2**30:.2f} GiB"


def unsharded_gradient_bytes(model: nn.Module, *, reduce_dtype: torch.dtype | None, tensor_size: int = 1) -> int:
    """Return the bytes that unsharded gradients take on each device while they wait to be reduced."""
    return sum(
        p.numel() // tensor_size * (reduce_dtype or p.dtype).itemsize
        for p in model.parameters()
        if p.requires_grad and isinstance(p, DTensor)
    )


def free_memory(device: torch.device) -> int | None:
    """Return the number of free bytes on ``device``, or None if it is unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


# Parameters


def choose_keeping(*, gathered: int, headroom: int | None, total: int) -> tuple[bool, str]:
    """Return whether ``gathered`` bytes fit into ``headroom`` of a device with ``total``, minus a reserve; and why."""
    if headroom is None:
        return False, "the free memory is not known"
    room = headroom - int(_RESERVE * total)
    fits = gathered <= room
    return fits, (
        f"{gathered / 2**30:.2f} GiB gathered {'fit' if fits else 'do not fit'} into the"
        f" {max(room, 0) / 2**30:.2f} GiB that are left beside a reserve of {_RESERVE:.0%}"
    )


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
