"""A differentiable all-to-all, which compiled code can contain."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def all_to_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return a tensor whose row ``i`` is the row of rank ``i`` that belongs to this rank.

    Args:
        tensor: [ranks, ...], a row for each rank.
        group: The ranks.
    """
    return _AllToAll.apply(tensor, group.group_name, group.size())


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str, size: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.size = group, size
        return _exchange(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.size), None, None


def _exchange(tensor: Tensor, group: str, size: int) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(tensor.contiguous(), [1] * size, [1] * size, group))
