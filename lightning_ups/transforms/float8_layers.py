"""Torchao's linear layers, made to take what torch's own take, and to say what they cannot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups.transforms.float8_product import FastSums, can_multiply, product

__all__ = ["adapted", "cast_by_kernels", "in_high_precision", "once_differentiable"]

_by_kernels = False


@contextmanager
def cast_by_kernels() -> Iterator[None]:
    """Let layers with one scale for each matrix cast by kernels of ours, while the context is open, where they can.

    How fast that is has not been measured yet: `benchmarks/float8.py` asks for it.
    """
    global _by_kernels
    before, _by_kernels = _by_kernels, True
    try:
        yield
    finally:
        _by_kernels = before


def adapted(float8: nn.Module, *, by_rows: bool) -> nn.Module:
    """Return torchao's layer, which from here on also takes no rows at all, and values that lie in any order.

    Args:
        float8: The layer.
        by_rows: Whether it has a scale for each row: it then cannot look at transposed values as a matrix.
    """
    float8.__class__ = _adapted_class(type(float8), by_rows=by_rows)
    return float8


@cache
def _adapted_class(plain: type[nn.Module], *, by_rows: bool) -> type[nn.Module]:
    class Float8Linear(plain):  # pyright: ignore[reportGeneralTypeIssues]
        def forward(self, input: Tensor) -> Tensor:
            if by_rows:
                input = input.contiguous()
            elif _by_kernels and (output := _with_kernels(self, input)) is not None:
                return output
            if torch.compiler.is_compiling():  # where there is no second derivative anyway
                return super().forward(input) if by_rows else _as_matrix(super().forward, input)
            if input.numel() == 0:
                return in_high_precision(self, input)
            if torch.is_inference_mode_enabled():
                # There operators reach torchao's tensors whole, such as reshape, that it only knows by their parts.
                with torch.inference_mode(mode=False), torch.no_grad():
                    return super().forward(input)
            return once_differentiable(super().forward(input))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # By its name a pickle would look for a class that is made here. By an older protocol, that insists on no class.
        make, arguments, *state = plain.__reduce_ex__(self, min(protocol, 1))
        return _remade, (by_rows, make, tuple(plain if a is type(self) else a for a in arguments)), *state

    Float8Linear.__doc__, Float8Linear.__reduce_ex__ = plain.__doc__, reduce  # type: ignore[method-assign]
    return Float8Linear


def _remade(by_rows: bool, make: Any, arguments: tuple[Any, ...]) -> nn.Module:  # noqa: FBT001
    return adapted(make(*arguments), by_rows=by_rows)


def _with_kernels(layer: Any, input: Tensor) -> Tensor | None:
    sums = layer.linear_mm_config
    values = input.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled() else input
    if sums.output.emulate or not can_multiply(values, layer.weight):
        return None
    fast = FastSums(*(each.use_fast_accum for each in (sums.output, sums.grad_input, sums.grad_weight)))
    output = product(values, layer.weight, fast)
    if layer.bias is not None:
        output = output + layer.bias.to(output.dtype)
    return output if torch.compiler.is_compiling() else once_differentiable(output)


def _as_matrix(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    # For its maximum torchao looks at an input as it comes, and in backward again, as a matrix. A compiler finds the
    # two to be one only where they have one shape; else it is one more pass over the memory of each input.
    if input.dim() <= 2:
        return forward(input)
    rows = forward(input.reshape(-1, input.shape[-1]))
    return rows.reshape(*input.shape[:-1], rows.shape[-1])


def in_high_precision(layer: Any, input: Tensor) -> Tensor:
    """Return what ``layer`` makes of no rows, which have no maximum to scale by."""
    weight = layer.weight
    if hasattr(weight, "to_original_precision"):  # gathered in float8
        weight = weight.to_original_precision()
    return F.linear(input.to(weight.dtype), weight, layer.bias)


def once_differentiable(value: Tensor) -> Tensor:
    """Return ``value``, whose gradient cannot be differentiated again: an error says so where it is asked for."""
    return _Once.apply(value) if value.requires_grad else value  # type: ignore[no-any-return]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A gradient through a linear layer in float8 is to be differentiated again, by create_graph=True."
                " Products in float8 have no second derivative: it would be missing from the result, or fail."
                " Leave these layers out, by exclude=[...] in the precision, or use BF16Precision."
            )
        return gradients[0]
