"""What a tensor is underneath: how often written, and what this rank has of it."""

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = [
    "arrived",
    "count_writes",
    "counts_of_writes",
    "gradient_hooks",
    "has_hooks_after_accumulation",
    "local_of",
    "memories_of",
    "memory_of",
    "plain_memory",
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
