"""The three float8 products of a linear layer with one scale per row, cast by kernels of this package.

The results are bitwise equal to torchao's, with operators that a compiler does not split. The input is kept for
backward in its own dtype, since backward needs it in another memory order; a compiler may recompute it instead.

Shape suffixes: M rows of K values, to N outputs; R is M rounded up to the size that products require.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows, scales_of
from lightning_ups.transforms.float8.product import FastSums

__all__ = ["multiplied_by_rows", "product_by_rows"]

_FLOAT8 = torch.float8_e4m3fn  # with one scale per row, gradients do not need the wider range of e5m2


def product_by_rows(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fast: FastSums,
    *,
    exact_weight_gradient: bool,
) -> Tensor:
    """Return ``values`` times the transposed ``weight`` plus ``bias``, with gradients in float8, too.

    Args:
        values: Any number of rows.
        weight: The weight of the layer.
        bias: The bias of the layer.
        fast: The products in which sums may have fewer bits.
        exact_weight_gradient: Whether the gradient of the weight is computed in the dtype of the values. The weight
            then has one scale, the smallest of its rows', in the product for the gradient of the input.
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
    """Compute `product_by_rows` for a matrix.

    A compiler's caches identify it by name, file and arguments, so everything it depends on must be among these.
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
    """Return the cast by columns, transposed, and the inverse scales: ``inverse`` if one scale is used for all."""
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
    """Return a product in ``dtype``, scaled by its kernel, or afterwards if sums are exact or no kernel scales rows.

    Scales are powers of two, which round nothing. Kernels that scale rows only write bfloat16.
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
    """Return whether there is a kernel that scales rows: torch 2.11 has none for CPUs.

    It checks for a single row, which must be known when a graph is compiled.
    """
    num_rows = left_AC.shape[0]
    return left_AC.device.type != "cpu" and (guard_or_false(num_rows != 1) or guard_or_false(num_rows == 1))
