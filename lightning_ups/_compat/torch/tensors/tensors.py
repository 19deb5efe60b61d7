"""What a tensor is underneath, such as how often it was written and what this rank has of it; and float32 products."""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = [
    "add_product",
    "arrived",
    "count_writes",
    "counts_of_writes",
    "forget_meshes",
    "gradient_hooks",
    "has_hooks_after_accumulation",
    "local_of",
    "memories_of",
    "memory_of",
    "plain_memory",
    "product",
    "whole_of",
]

_CONTAINERS = (tuple, list, dict)
_VERSION = attrgetter("_version")


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad


def arrived(value: Any) -> Any:
    """Return ``value``, or what a collective brings where it is a tensor that waits for one, also in containers.

    A layer that tensor parallelism splits returns such tensors. Compiled code takes them apart, and what is inside has
    no part in autograd: their gradient would be lost without a word.
    """
    return tree_map_only(AsyncCollectiveTensor, _Arrival.apply, value) if _waits(value) else value


def _waits(value: Any) -> bool:
    # For every call of a compiled block: `tree_leaves` would take several times as long.
    if isinstance(value, _CONTAINERS):
        return any(map(_waits, value.values() if isinstance(value, dict) else value))
    return type(value) is AsyncCollectiveTensor


def count_writes(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written in place; writes through ``tensor.data`` are not counted."""
    return tensor._version


def counts_of_writes(tensors: Iterable[Tensor]) -> list[int]:
    """Return `count_writes` of each, in less time."""
    return [*map(_VERSION, tensors)]


def memory_of(parameter: nn.Parameter) -> int:
    """Return where ``parameter`` lies, which is another place once ``parameter.data`` was set; a fake one has none."""
    return parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def memories_of(parameters: Collection[nn.Parameter]) -> list[int]:
    """Return `memory_of` of each, in less time."""
    plain = {*map(type, parameters)} <= {nn.Parameter}
    return [*map(Tensor.data_ptr if plain else memory_of, parameters)]


def local_of(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, or a whole one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered, on every rank, or a whole one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_memory(tensor: Tensor | None) -> Any:
    """Return the tensor whose memory ``tensor`` is: itself, but for weights that torchao gathers in float8."""
    return tensor._tensor if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor  # type: ignore[union-attr]


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``tensor.register_hook`` was given."""
    return [*(tensor._backward_hooks or {}).values()]


def has_hooks_after_accumulation(tensor: Tensor) -> bool:
    """Return whether ``tensor.register_post_accumulate_grad_hook`` was called, and not undone."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


_PIECES = 8


def product(a: Tensor, b: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` in ``dtype``, which is theirs or float32; summed in float32 at least."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    wide = torch.promote_types(a.dtype, torch.float32)
    result = torch.mm(a.to(wide), b.to(wide)).to(dtype)
    return result if out is None else out.copy_(result)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which is of their type or float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_into_float32(a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        rows = -(-len(total) // _PIECES) or 1
        for start in range(0, len(total), rows):  # so that the product takes little beside what it is added to
            piece = slice(start, start + rows)
            total[piece].add_(product(a[piece], b, dtype=total.dtype))


@cache
def _adds_into_float32(dtype: torch.dtype) -> bool:
    # 2.9 has the argument and refuses a float32 summand, 2.11 takes one; asking a small product is the way to know.
    total = torch.zeros(16, 16, device="cuda")
    a = torch.ones(16, 16, device="cuda", dtype=dtype)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16).all())


def forget_meshes() -> None:
    """Let this thread forget what operators make of DTensors: of two equal meshes it knows the groups of the earlier.

    These may be gone by then, with the world that they were of.
    """
    # Torch 2.11 and 2.13 have two such memories each, one of C++ and one of Python.
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()
    remembered = getattr(DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear", None)
    if remembered is not None:
        remembered()
