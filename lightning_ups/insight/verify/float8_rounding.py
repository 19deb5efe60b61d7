"""Linear layers with operands rounded to float8 by casts: the reference for the accuracy of a float8 recipe.

It shares no code with the float8 kernels, since their results are compared with it.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ups.transforms.forward import Forward, replaced_forward

Rounding = Literal[  # hybrid: gradients in e5m2
    "tensor", "tensor, hybrid", "row", "row, gradient of the weight exact", "block", "block, hybrid"
]
_BLOCK = 32


def rounded(x: Tensor, *, per: Literal["tensor", "row", "block"], dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round ``x`` to float8 and return it in float32, with one scale per tensor, row, or 32 values of a row."""
    grouped = x.float()
    if per == "block":
        grouped = grouped.unflatten(-1, (-1, _BLOCK))
    largest = grouped.abs().amax() if per == "tensor" else grouped.abs().amax(-1, keepdim=True)
    scale = torch.finfo(dtype).max / largest.clamp_min(1e-12)
    if per != "tensor":
        scale = torch.exp2(torch.floor(torch.log2(scale)))  # scales of these recipes are powers of two
    return ((grouped * scale).to(dtype).float() / scale).view(x.shape)


@contextmanager
def rounded_linears(linears: Iterable[nn.Linear], rounding: Rounding) -> Iterator[None]:
    """Round inputs, weights and gradients of ``linears`` to float8 while the context is open."""
    with ExitStack() as stack:
        for linear in linears:
            stack.enter_context(replaced_forward(linear, lambda forward: _forward(forward, rounding)))
        yield


def _forward(_: Forward, rounding: Rounding) -> Forward:
    def forward(linear: Any, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        product = _Product.apply(x.to(dtype), linear.weight.to(dtype), rounding)
        return product if linear.bias is None else product + linear.bias.to(dtype)

    return forward


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        per = _per(rounding)
        return (_rows(x, per) @ rounded(weight, per=per).t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        per, rows = _per(ctx.rounding), gradient.reshape(-1, gradient.shape[-1])
        kind = torch.float8_e5m2 if ctx.rounding.endswith("hybrid") else torch.float8_e4m3fn
        for_input = rounded(rows, per=per, dtype=kind) @ rounded(weight.t(), per=per).t()
        inputs = x.reshape(-1, x.shape[-1])
        if ctx.rounding.endswith("exact"):
            for_weight = rows.float().t() @ inputs.float()
        else:
            for_weight = _columns(rows, per, kind).t() @ _columns(inputs, per, torch.float8_e4m3fn)
        return for_input.to(x.dtype).view(x.shape), for_weight.to(weight.dtype), None


def _per(rounding: Rounding) -> Literal["tensor", "row", "block"]:
    return "tensor" if rounding.startswith("tensor") else "block" if rounding.startswith("block") else "row"


def _rows(x: Tensor, per: Literal["tensor", "row", "block"]) -> Tensor:
    return rounded(x.reshape(-1, x.shape[-1]), per=per)


def _columns(x: Tensor, per: Literal["tensor", "row", "block"], dtype: torch.dtype) -> Tensor:
    """Round along the rows, over which the gradient of a weight is summed."""
    turned = x.t()
    missing = -turned.shape[-1] % _BLOCK if per == "block" else 0
    padded = torch.nn.functional.pad(turned, (0, missing))
    return rounded(padded, per=per, dtype=dtype)[:, : turned.shape[-1]].t()
