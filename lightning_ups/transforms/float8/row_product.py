"""A linear layer's three products in float8 by a scale for each row, cast by kernels of ours.

What torchao computes, bit for bit, by operators that a compiler leaves whole. What comes in is kept for backward as it
is, which a compiler may compute again instead: it is needed in another order there.

Shape suffixes: M rows, of K values each, to N; R is M rounded up to what products take.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows, scales_of
from lightning_ups.transforms.float8.product import FastSums

__all__ = ["multiplied_by_rows", "product_by_rows"]

_FLOAT8 = torch.float8_e4m3fn  # a scale for each row leaves gradients of one row less range to want


def product_by_rows(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fast: FastSums,
    *,
    exact_weight_gradient: bool,
) -> Tensor:
    """Return ``values`` times the transposed ``weight`` and ``bias``, with gradients in float8 too.

    Args:
        values: Any number of rows.
        weight: Of the layer.
        bias: Of the layer.
        fast: In which products sums may have fewer bits.
        exact_weight_gradient: Whether the gradient of the weight is a product in the type of the values, and the
            weight has one scale in the product for the gradient of the input: the least of its rows'.
    """
    values_MK = values.reshape(-1, values.shape[-1]).contiguous()
    output_MN = multiplied_by_rows(values_MK, weight, bias, fast, exact_weight_gradient)
    return output_MN.reshape(*values.shape[:-1], weight.shape[0])


@torch.compiler.allow_in_graph
def multiplied_by_rows(
    values_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    fast: FastSums,
    exact: bool,  # noqa: FBT001
) -> Tensor:
    """Do what `product_by_rows` does with a matrix.

    A compiler's caches know it by its name, its file and its arguments: whatever it computes by has to be among these.
    """
    output_MN: Tensor = _Product.apply(values_MK, weight_NK, bias_N, fast, exact)
    return output_MN


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        fast: FastSums,
        exact: bool,  # noqa: FBT001
    ) -> Tensor:
        rows_MK, inverse_M = scaled_rows(values_MK, _FLOAT8)
        rows_NK, inverse_N = scaled_rows(weight_NK, _FLOAT8)
        kept_MK = values_MK if weight_NK.requires_grad else None
        ctx.save_for_backward(kept_MK, weight_NK, inverse_N.amax() if exact else None)
        ctx.fast, ctx.exact, ctx.bias_dtype = fast, exact, None if bias_N is None else bias_N.dtype
        output_MN = _multiply(rows_MK, rows_NK, inverse_M, inverse_N, values_MK.dtype, fast=fast.output)
        return output_MN if bias_N is None else output_MN + bias_N.to(output_MN.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values_MK, weight_NK, weight_inverse = ctx.saved_tensors
        gradient_MN, fast = gradients[0].contiguous(), ctx.fast
        dtype = gradient_MN.dtype
        input_gradient_MK = weight_gradient_NK = bias_gradient_N = None
        if ctx.needs_input_grad[0]:
            rows_MN, inverse_M = scaled_rows(gradient_MN, _FLOAT8)
            columns_KN, inverse_K = _by_columns(weight_NK, inverse=weight_inverse)
            input_gradient_MK = _multiply(rows_MN, columns_KN, inverse_M, inverse_K, dtype, fast=fast.input_gradient)
        if ctx.needs_input_grad[1]:
            if ctx.exact:
                weight_gradient_NK = gradient_MN.t() @ values_MK
            else:
                columns_NR, inverse_N = _by_columns(gradient_MN)
                columns_KR, inverse_K = _by_columns(values_MK)
                weight_gradient_NK = _multiply(
                    columns_NR, columns_KR, inverse_N, inverse_K, dtype, fast=fast.weight_gradient
                )
        if ctx.needs_input_grad[2]:
            bias_gradient_N = gradient_MN.sum(0).to(ctx.bias_dtype)
        return input_gradient_MK, weight_gradient_NK, bias_gradient_N, None, None


def _by_columns(values_MK: Tensor, *, inverse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the cast by columns, transposed, and what undoes their scales: ``inverse``, if they have one for all."""
    if inverse is None:
        scale_K = scales_of(column_maxima(values_MK).amax(0), values_MK.dtype, _FLOAT8)
    else:
        scale_K = inverse.reciprocal().expand(values_MK.shape[1]).contiguous()
    return scaled_columns(values_MK, scale_K, _FLOAT8), scale_K.reciprocal()


def _multiply(
    left_AC: Tensor,
    right_BC: Tensor,
    inverse_A: Tensor,
    inverse_B: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Return a product in ``dtype``: scaled by its kernel, or behind it where sums are whole or no kernel scales rows.

    Scales are powers of two, by which nothing is rounded. The kernel that knows them writes bfloat16 alone.
    """
    scales = fast and _kernel_scales(left_AC)
    left_inverse, right_inverse = inverse_A[:, None], inverse_B[None, :]
    one = inverse_A.new_ones(())
    output_AB = torch._scaled_mm(
        left_AC,
        right_BC.t(),
        scale_a=left_inverse if scales else one,
        scale_b=right_inverse if scales else one,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    scaled_AB = output_AB if scales else (output_AB * (left_inverse * right_inverse)).to(torch.bfloat16)
    return scaled_AB.to(dtype)


def _kernel_scales(left_AC: Tensor) -> bool:
    """Return whether there is a kernel that scales rows: on CPUs torch 2.11 has none.

    It asks whether there is one row, which a graph has to know while it is compiled.
    """
    num_rows = left_AC.shape[0]
    return left_AC.device.type != "cpu" and (guard_or_false(num_rows != 1) or guard_or_false(num_rows == 1))
