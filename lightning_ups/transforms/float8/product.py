"""The three float8 products of a linear layer, cast by kernels of this package.

The results are bitwise equal to torchao's, with a third of the operators, which a compiler does not split: a graph
compiles faster, and the cost of a cast does not depend on what it is fused with. The gradient of a bias is computed
after those of the products: the compiler then reads the incoming gradient from memory, where the casts need it anyway,
and does not compute it twice.

With one scale per matrix, one cast of the input serves both products that read it, in the memory order of each;
backward keeps the cast instead of the values, at half the bytes. With one scale per row, the input is kept for backward
in its own dtype, since backward needs it in another memory order; a compiler may recompute it instead.

Shape suffixes: M rows of K values, to N outputs; R is M rounded up to the size that products require.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from lightning_ups.kernels.float8_casts import HAS_KERNELS, TYPES, both_orders, column_order, maxima, row_order
from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows, scales_of

_E4M3 = torch.float8_e4m3fn  # with one scale per row, gradients do not need the wider range of e5m2


class FastSums(NamedTuple):
    """The products in which sums may have fewer bits than float32, which is faster."""

    output: bool
    input_gradient: bool
    weight_gradient: bool


def can_multiply(values: Tensor, weight: Any) -> bool:
    """Return whether `product` supports these: non-empty plain tensors, or a weight gathered in float8.

    On a GPU it is slow without the kernels.
    """
    if values.device.type == "cuda" and not HAS_KERNELS:
        return False
    whole = type(weight._data) is Tensor if _is_cast(weight) else _is_plain(weight)
    return whole and _is_plain(values) and guard_or_true(values.numel() > 0)


def product(
    values: Tensor, weight: Tensor, bias: Tensor | None, fast: FastSums, *, backward_dtype: torch.dtype
) -> Tensor:
    """Return ``values`` times the transposed ``weight`` plus ``bias``; gradients are cast to ``backward_dtype``."""
    values_MK = values.reshape(-1, values.shape[-1]).contiguous()
    keeps = torch.is_grad_enabled() and weight.requires_grad
    output_MN = multiplied(values_MK, weight, bias, fast, keeps, backward_dtype)
    return output_MN.reshape(*values.shape[:-1], weight.shape[0])


@torch.compiler.allow_in_graph
def multiplied(
    values_MK: Tensor,
    weight: Any,
    bias_N: Tensor | None,
    fast: FastSums,
    keeps: bool,  # noqa: FBT001
    backward_dtype: torch.dtype,
) -> Tensor:
    """Compute `product` for a matrix.

    A compiler's caches identify it by name, file and arguments, so everything it depends on must be among these.
    """
    output_MN: Tensor = _Product.apply(values_MK, weight, bias_N, fast, keeps, backward_dtype)
    return output_MN


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in TYPES


def _is_cast(weight: Any) -> bool:
    return type(weight).__name__ == "Float8TrainingTensor"  # while a graph is traced, its content does not matter


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_MK: Tensor,
        weight: Any,
        bias_N: Tensor | None,
        fast: FastSums,
        keeps: bool,  # noqa: FBT001
        backward_dtype: torch.dtype,
    ) -> Tensor:
        maxima_P, columns_KR = maxima(values_MK), None
        if keeps:
            rows_MK, columns_KR, inverse = both_orders(values_MK, maxima_P, _E4M3)
        else:
            rows_MK, inverse = row_order(values_MK, maxima_P, _E4M3)
        if _is_cast(weight):
            weight_maxima_P, rows_NK, weight_inverse = None, weight._data, weight._scale.reciprocal()
        else:
            weight_maxima_P = maxima(weight)
            rows_NK, weight_inverse = row_order(weight, weight_maxima_P, _E4M3)
        ctx.save_for_backward(columns_KR, inverse, weight, weight_maxima_P)  # weights are cast again in backward
        ctx.fast, ctx.dtype, ctx.bias_dtype = fast, backward_dtype, None if bias_N is None else bias_N.dtype
        output_MN = _multiply(rows_MK, rows_NK, inverse, weight_inverse, values_MK.dtype, fast=fast.output)
        return output_MN if bias_N is None else output_MN + bias_N.to(output_MN.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        columns_KR: Tensor | None
        columns_KR, inverse, weight, weight_maxima_P = ctx.saved_tensors
        gradient_MN, fast = gradients[0].contiguous(), ctx.fast
        dtype, maxima_P = gradient_MN.dtype, maxima(gradient_MN)
        input_gradient_MK = weight_gradient_NK = bias_gradient_N = columns_NR = None
        if columns_KR is None:
            rows_MN, gradient_inverse = row_order(gradient_MN, maxima_P, ctx.dtype)
        else:
            rows_MN, columns_NR, gradient_inverse = both_orders(gradient_MN, maxima_P, ctx.dtype)
        if ctx.needs_input_grad[0]:
            if weight_maxima_P is None:
                columns_KN, weight_inverse = weight._data.t().contiguous(), weight._scale.reciprocal()
            else:
                columns_KN, weight_inverse = column_order(weight, weight_maxima_P, _E4M3)
            input_gradient_MK = _multiply(
                rows_MN, columns_KN, gradient_inverse, weight_inverse, dtype, fast=fast.input_gradient
            )
        if columns_NR is not None and columns_KR is not None:
            weight_gradient_NK = _multiply(
                columns_NR, columns_KR, gradient_inverse, inverse, dtype, fast=fast.weight_gradient
            )
        if ctx.needs_input_grad[2]:
            bias_gradient_N = gradient_MN.sum(0).to(ctx.bias_dtype)
        return input_gradient_MK, weight_gradient_NK, bias_gradient_N, None, None, None


def _multiply(
    left_AC: Tensor, right_BC: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    return torch._scaled_mm(
        left_AC,
        right_BC.t(),
        scale_a=left_inverse,
        scale_b=right_inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


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
    output_MN: Tensor = _ProductByRows.apply(values_MK, weight_NK, bias_N, fast, exact)
    return output_MN


class _ProductByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        fast: FastSums,
        exact: bool,  # noqa: FBT001
    ) -> Tensor:
        rows_MK, inverse_M = scaled_rows(values_MK, _E4M3)
        rows_NK, inverse_N = scaled_rows(weight_NK, _E4M3)
        kept_MK = values_MK if weight_NK.requires_grad else None
        ctx.save_for_backward(kept_MK, weight_NK, inverse_N.amax() if exact else None)
        ctx.fast, ctx.exact, ctx.bias_dtype = fast, exact, None if bias_N is None else bias_N.dtype
        output_MN = _multiply_rows(rows_MK, rows_NK, inverse_M, inverse_N, values_MK.dtype, fast=fast.output)
        return output_MN if bias_N is None else output_MN + bias_N.to(output_MN.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values_MK, weight_NK, weight_inverse = ctx.saved_tensors
        gradient_MN, fast = gradients[0].contiguous(), ctx.fast
        dtype = gradient_MN.dtype
        input_gradient_MK = weight_gradient_NK = bias_gradient_N = None
        if ctx.needs_input_grad[0]:
            rows_MN, inverse_M = scaled_rows(gradient_MN, _E4M3)
            columns_KN, inverse_K = _by_columns(weight_NK, inverse=weight_inverse)
            input_gradient_MK = _multiply_rows(
                rows_MN, columns_KN, inverse_M, inverse_K, dtype, fast=fast.input_gradient
            )
        if ctx.needs_input_grad[1]:
            if ctx.exact:
                weight_gradient_NK = gradient_MN.t() @ values_MK
            else:
                columns_NR, inverse_N = _by_columns(gradient_MN)
                columns_KR, inverse_K = _by_columns(values_MK)
                weight_gradient_NK = _multiply_rows(
                    columns_NR, columns_KR, inverse_N, inverse_K, dtype, fast=fast.weight_gradient
                )
        if ctx.needs_input_grad[2]:
            bias_gradient_N = gradient_MN.sum(0).to(ctx.bias_dtype)
        return input_gradient_MK, weight_gradient_NK, bias_gradient_N, None, None


def _by_columns(values_MK: Tensor, *, inverse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the cast by columns, transposed, and the inverse scales: ``inverse`` if one scale is used for all."""
    if inverse is None:
        scale_K = scales_of(column_maxima(values_MK).amax(0), values_MK.dtype, _E4M3)
    else:
        scale_K = inverse.reciprocal().expand(values_MK.shape[1]).contiguous()
    return scaled_columns(values_MK, scale_K, _E4M3), scale_K.reciprocal()


def _multiply_rows(
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
