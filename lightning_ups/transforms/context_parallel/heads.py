"""Attention of a sequence whose parts are on several ranks: each rank computes some heads, for all positions.

This is the all-to-all of DeepSpeed-Ulysses. Any attention kernel works unchanged, and ranks compute equally much,
also with a causal mask.

B batch, T positions, t positions of a rank, H heads, h heads of a rank, N ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ups._compat.torch.tensors.all_to_all import all_to_all


def attend_by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, *, group: ProcessGroup
) -> Tensor:
    """Return this rank's positions of ``attend(q, k, v)``, which is called with all positions of some heads.

    Args:
        attend: Takes and returns tensors [batch, seq, heads, dim].
        q: Queries [batch, part, heads, dim].
        k: Keys [batch, part, kv heads, dim]; the query heads share them in order.
        v: Values, likewise.
        group: The ranks, in the order of their parts.

    Raises:
        ValueError: If the query heads do not divide.
    """
    size, heads, kv_heads = group.size(), q.shape[2], k.shape[2]
    if heads % size:
        raise ValueError(
            f"Attention with {heads} heads cannot be divided by context_parallel_size={size}: each rank computes some"
            f" heads. Choose a size that divides {heads}."
        )
    # With fewer heads of keys and values than ranks, some ranks compute with the same one.
    groups = range(1, heads // kv_heads + 1)
    copies = next(n for n in groups if heads // kv_heads % n == 0 and kv_heads * n % size == 0)
    if copies > 1:
        k, v = (tensor.repeat_interleave(copies, dim=2) for tensor in (k, v))
    return _to_positions(attend(*_to_heads((q, k, v), group)), group)


def _to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return [B, T, h, dim] for each [B, t, H, dim], with one collective."""
    size = group.size()
    rows = [tensor.unflatten(2, (size, -1)).movedim(2, 0) for tensor in tensors]  # [N, B, t, h, dim]
    received = all_to_all(torch.cat([row.flatten(1) for row in rows], dim=1), group)
    parts = received.split([row[0].numel() for row in rows], dim=1)
    return [part.view(row.shape).movedim(0, 1).flatten(1, 2) for part, row in zip(parts, rows, strict=True)]


def _to_positions(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return [B, t, H, dim] for ``tensor`` [B, T, h, dim]."""
    row = tensor.unflatten(1, (group.size(), -1)).movedim(1, 0)  # [N, B, t, h, dim]
    return all_to_all(row.contiguous(), group).movedim(0, 2).flatten(2, 3)
