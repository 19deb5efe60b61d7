"""Parts of a sequence: split, gathered and averaged over the ranks of a group, with the right gradients.

Ranks of a group have the same batch. Outside of the split module they compute the same; within it, each computes the
positions of its part. All gradients are averaged over all ranks, also those of one group. So a gradient within the
split module is that of this rank's part times the number of ranks; outside of it, it is the whole gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def split(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of dimension 1, which the size of ``group`` divides."""
    return _Split.apply(tensor, group)


def gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sequence of which each rank has a ``part`` along dimension 1."""
    return _Gather.apply(part, group)


def average(loss: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:
    """Return the mean of ``loss``, the mean of ``count`` values of this rank, over the values of all ranks."""
    return _Average.apply(loss, count, group)


def _part(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), dim=1)[group.rank()]


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    rows = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(rows, part.contiguous(), group=group)
    return rows.unflatten(0, (group.size(), -1)).movedim(0, 1).flatten(1, 2)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _part(tensor, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grad, ctx.group) / ctx.group.size(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _part(grad, ctx.group) * ctx.group.size(), None


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        # A part without any value has the mean NaN.
        own = torch.stack((torch.where(count > 0, loss.double() * count, 0.0), count.double()))
        total = own.clone()
        dist.all_reduce(total, group=group)
        ctx.share = own[1] / total[1] * group.size()
        return (total[0] / total[1]).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return (grad * ctx.share).to(grad.dtype), None, None
