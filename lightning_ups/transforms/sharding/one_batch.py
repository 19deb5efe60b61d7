"""Checks and random state for ranks that compute one batch together under tensor parallelism."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ups.transforms.random_state import random_state, restore_random_state

__all__ = ["check_one_batch", "share_random_state"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def share_random_state(group: ProcessGroup) -> None:
    """Continue with the random state of the first rank. Under `seed_everything` this changes nothing."""
    state = [random_state()]
    dist.broadcast_object_list(state, group=group, group_src=0)
    restore_random_state(state[0])


def check_one_batch(batch: Any, *, group: ProcessGroup) -> None:
    """Check that all ranks of ``group`` have the same tensors in their ``batch``. A collective.

    Raises:
        ValueError: If they differ.
    """
    own = [(tuple(tensor.shape), str(tensor.dtype), _sum(tensor)) for tensor in _tensors(batch)]
    seen: list[Any] = [None] * group.size()
    dist.all_gather_object(seen, own, group=group)
    if all(other == own for other in seen):
        return
    ranks = " and ".join(map(str, dist.get_process_group_ranks(group)))
    raise ValueError(
        f"Ranks {ranks} were given different batches. With tensor_parallel_size={group.size()} they must compute parts"
        " of the same batch. Keep Trainer(use_distributed_sampler=True), or create your sampler with"
        " trainer.distributed_sampler_kwargs. Random crops and augmentations must be the same on these ranks: draw them"
        " from torch's generator, and do not use workers=True of seed_everything."
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a container, which need not be one that can be rebuilt."""
    if isinstance(batch, Tensor):
        yield from batch.unbind() if batch.is_nested else (batch,)
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name, None) for field in fields(batch)]
    for part in parts:
        yield from _tensors(part)


@torch.no_grad()
def _sum(tensor: Tensor) -> int:
    """Return a sum of the bits of ``tensor`` that depends on the order of its rows."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    tensor = tensor.resolve_conj().resolve_neg()
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = numbers.contiguous().view(_INTEGERS[numbers.element_size()])
    sums = flat.reshape(flat.shape[0] if flat.dim() else 1, -1).sum(1, dtype=torch.int64)
    return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
