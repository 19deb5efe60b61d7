"""Faults that a guard of numerics must see, put into one block on purpose."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups.transforms.forward import Forward, replaced_forward

__all__ = ["FAULTS", "Fault"]

Fault = Callable[[nn.Module], AbstractContextManager[None]]


@contextmanager
def _skipped(block: nn.Module) -> Iterator[None]:
    """The block returns its input."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return args[0] + 0 * output
        return (args[0] + 0 * output[0], *output[1:])

    handle = block.register_forward_hook(hook)
    with _removed(handle):
        yield


@contextmanager
def _doubled(block: nn.Module) -> Iterator[None]:
    """Gradients of the block's parameters are twice what they are."""
    handles = [p.register_hook(lambda gradient: 2 * gradient) for p in block.parameters() if p.requires_grad]
    with _removed(*handles):
        yield


@contextmanager
def _wrong_type(block: nn.Module) -> Iterator[None]:
    """One linear layer multiplies in float8 without a scale: small values, as gradients have, are lost."""
    with replaced_forward(_linear(block), _unscaled):
        yield


@contextmanager
def _stale_scale(block: nn.Module) -> Iterator[None]:
    """The scale of one weight is that of a weight 16 times smaller: all larger values are cut off."""
    linear = _linear(block)

    def cut(weight: Tensor) -> Tensor:
        limit = weight.detach().abs().amax() / 16
        return weight.clamp(-limit, limit)

    with replaced_forward(linear, lambda forward: _with_weight(forward, cut)):
        yield


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "a skipped block": _skipped,
        "a gradient scaled by 2": _doubled,
        "a layer in the wrong type": _wrong_type,
        "a stale scale": _stale_scale,
    }
)


def _linear(block: nn.Module) -> nn.Module:
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(
            f"{type(block).__name__} holds no linear layer."
            " These faults are put into the product of one, to see what they do to the numbers."
            " Leave the faults out: verify --no_faults."
        )
    return linears[-1]  # what it gives is added to the stream that all later blocks read


def _unscaled(forward: Forward) -> Forward:
    def changed(linear: Any, x: Tensor) -> Tensor:
        return _Unscaled.apply(forward(linear, _Unscaled.apply(x)))

    return changed


def _with_weight(forward: Forward, change: Callable[[Tensor], Tensor]) -> Forward:  # noqa: ARG001
    def changed(linear: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, change(linear.weight).to(x.dtype), _as(linear.bias, x))

    return changed


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


class _Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.clamp(-448, 448).to(torch.float8_e4m3fn).to(gradient.dtype)


@contextmanager
def _removed(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
