"""Internals of tensors, such as version counters and local parts; and float32 products of bfloat16 tensors."""

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

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
    """Return ``value`` with tensors that wait for a collective replaced by its results, also in containers.

    A layer split by tensor parallelism returns such tensors. Compiled code unwraps them, and the inner tensor is not
    part of autograd: their gradient would be silently lost.
    """
    return tree_map_only(AsyncCollectiveTensor, _Arrival.apply, value) if _waits(value) else value


def _waits(value: Any) -> bool:
    # Runs in every call of a compiled block: `tree_leaves` would take several times as long.
    if isinstance(value, _CONTAINERS):
        return any(map(_waits, value.values() if isinstance(value, dict) else value))
    return type(value) is AsyncCollectiveTensor


def count_writes(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written in place; writes through ``tensor.data`` are not counted."""
    return tensor._version


def counts_of_writes(tensors: Iterable[Tensor]) -> list[int]:
    """Return `count_writes` of each tensor, in less time."""
    return [*map(_VERSION, tensors)]


def memory_of(parameter: nn.Parameter) -> int:
    """Return the address of ``parameter``, which changes when ``parameter.data`` is set; a fake one has none."""
    return parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def memories_of(parameters: Collection[nn.Parameter]) -> list[int]:
    """Return `memory_of` of each parameter, in less time."""
    plain = {*map(type, parameters)} <= {nn.Parameter}
    return [*map(Tensor.data_ptr if plain else memory_of, parameters)]


def local_of(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, or an unsharded one unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered, on every rank, or an unsharded one unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_memory(tensor: Tensor | None) -> Any:
    """Return the tensor that owns the memory of ``tensor``: itself, except for float8-gathered weights of torchao."""
    return tensor._tensor if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor  # type: ignore[union-attr]


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks registered with ``tensor.register_hook``."""
    return [*(tensor._backward_hooks or {}).values()]


def has_hooks_after_accumulation(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has hooks from ``register_post_accumulate_grad_hook``."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


_PIECES = 8


def product(a: Tensor, b: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` in ``dtype``, their own or float32, accumulated at least in float32."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    wide = torch.promote_types(a.dtype, torch.float32)
    result = torch.mm(a.to(wide), b.to(wide)).to(dtype)
    return result if out is None else out.copy_(result)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which has their dtype or float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        rows = -(-len(total) // _PIECES) or 1
        for start in range(0, len(total), rows):  # so that the product takes little memory
            piece = slice(start, start + rows)
            total[piece].add_(product(a[piece], b, dtype=total.dtype))


def forget_meshes() -> None:
    """Clear this thread's caches of DTensor operators: for two equal meshes they keep the groups of the earlier one.

    These groups may be destroyed by then, with their world.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
