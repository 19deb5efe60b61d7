"""Faults of numerics, injected into one block to show that ``verify`` finds them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_ups.transforms.forward import Forward, replaced_forward
from lightning_ups.transforms.te import is_computed

Fault = Callable[[nn.Module], AbstractContextManager[None]]


@contextmanager
def _skipped(block: nn.Module) -> Iterator[None]:
    """The block returns its input, or zeros if its output has another shape."""

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        index = next((i for i, leaf in enumerate(leaves) if _is_float(leaf)), None)
        if index is None:
            return None
        given = [x for x in tree_leaves((args, kwargs)) if _is_float(x) and x.shape == leaves[index].shape]
        leaves[index] = given[0] + 0 * leaves[index] if given else 0 * leaves[index]
        return tree_unflatten(leaves, spec)

    with block.register_forward_hook(hook, with_kwargs=True):
        yield


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@contextmanager
def _doubled(block: nn.Module) -> Iterator[None]:
    """The gradients of the block's parameters are doubled."""
    with ExitStack() as stack:
        for p in block.parameters():
            if p.requires_grad:
                stack.enter_context(p.register_hook(lambda gradient: 2 * gradient))
        yield


@contextmanager
def _wrong_type(block: nn.Module) -> Iterator[None]:
    """One layer computes in float8 without a scale, so that small gradients are lost."""
    with replaced_forward(_computing(_product(block), block), _unscaled):
        yield


@contextmanager
def _stale_scale(block: nn.Module) -> Iterator[None]:
    """One weight has the scale of a weight 16 times smaller, so that larger values are clipped."""
    product = _product(block)

    def cut(weight: Tensor) -> Tensor:
        limit = weight.detach().abs().amax() / 16
        return weight.clamp(-limit, limit)

    with replaced_forward(_computing(product, block), lambda forward: _with_weight(forward, product, cut)):
        yield


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "a skipped block": _skipped,
        "a gradient scaled by 2": _doubled,
        "a layer in the wrong type": _wrong_type,
        "a stale scale": _stale_scale,
    }
)


def _product(block: nn.Module) -> nn.Module:
    """Return the last of the largest layers with a weight matrix: a small one may be an adapter, which outputs zero."""
    linears = [module for module in block.modules() if isinstance(module, nn.Linear) and not _is_read(module)]
    if found := linears or [module for module in block.modules() if _multiplies(module)]:
        return max(reversed(found), key=lambda module: cast("Tensor", module.weight).numel())
    raise ValueError(
        f"{type(block).__name__} has no layer with a weight matrix, into which faults are injected."
        " Run verify --no_faults."
    )


def _computing(product: nn.Module, block: nn.Module) -> nn.Module:
    """Return the module that computes ``product``: itself, or a Transformer Engine module that fuses it."""
    return next((m for m in block.modules() if is_computed(m) and product in {*m.modules()}), product)


def _is_read(module: nn.Module) -> bool:
    # nn.MultiheadAttention reads its weight without calling it.
    return type(module).__name__ == "NonDynamicallyQuantizableLinear"


def _multiplies(module: nn.Module) -> bool:
    if _is_read(module):
        return False
    weight = vars(module)["_parameters"].get("weight")  # transformers' Conv1D is no nn.Linear
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return weight is not None and weight.dim() > 1 and not looks_up and not [*module.children()]


def _unscaled(forward: Forward) -> Forward:
    def changed(layer: Any, x: Tensor) -> Tensor:
        given = x if is_computed(layer) else _Unscaled.apply(x)  # a fused module recognizes the output of its norm
        return _Unscaled.apply(forward(layer, given))

    return changed


def _with_weight(forward: Forward, product: Any, change: Callable[[Tensor], Tensor]) -> Forward:
    def of_linear(linear: Any, x: Tensor) -> Tensor:  # its weight may be a property of a parametrization
        return torch.nn.functional.linear(x, change(linear.weight).to(x.dtype), _as(linear.bias, x))

    def changed(layer: Any, x: Tensor) -> Tensor:
        if layer is product and isinstance(layer, nn.Linear):
            return of_linear(layer, x)
        vars(product)["weight"] = change(product.weight)  # found before the parameter of that name
        try:
            return forward(layer, x)
        finally:
            del vars(product)["weight"]

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
