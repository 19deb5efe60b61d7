"""Casts of a matrix to float8 by one scale, in the two orders that products read, as operators that a compiler keeps.

Left to themselves compilers join such a cast with whatever makes the matrix, and look for its maximum by computing that
once more. Here a matrix is read twice, at the pace of memory: for its maximum, and to be cast, in both orders at once.

The values are those of torchao, bit for bit: ``largest / max(maximum, 1e-12)`` in float64 is the scale in float32.

Shape suffixes: M rows of K values, R values of M rounded up to what the kernels of products take, P parts of a maximum.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import has
from lightning_ups._compat.torch.tensors.custom_ops import define_operator

__all__ = [
    "HAS_KERNELS",
    "INNER",
    "PARTS",
    "TYPES",
    "both_orders",
    "by_kernel",
    "can_transpose",
    "column_order",
    "largest_of",
    "maxima",
    "rounded_up",
    "row_order",
    "transpose_into",
]

TYPES = (torch.bfloat16, torch.float16, torch.float32)
PARTS = 1024  # of a maximum; each program of a cast reads them all
INNER = 16  # what the dimension that is summed over must be a multiple of
LEAST = 1e-12
HAS_KERNELS = torch.version.hip is None and has("triton")  # AMD's GPUs have float8 types of their own


def largest_of(dtype: torch.dtype) -> float:
    """Return the largest value of a float8 type."""
    return torch.finfo(dtype).max


def rounded_up(size: int) -> int:
    """Return what the dimension of a product that is summed over becomes.

    Never none: some processors' products of no terms leave what the memory held.
    """
    at_least: Any = torch.sym_max(size + INNER - 1, INNER)  # of a size that a graph may not know
    return at_least // INNER * INNER


def _maxima(values_MK: Tensor) -> Tensor:
    if by_kernel(values_MK):
        from lightning_ups.kernels.float8_casts_triton import maxima_launch

        maxima_P = _fake_maxima(values_MK)
        maxima_launch(values_MK.contiguous(), maxima_P).run(values_MK.device)
        return maxima_P
    if values_MK.numel() == 0:
        return values_MK.new_zeros(PARTS, dtype=torch.int32)
    half = values_MK.dtype.itemsize == 2
    bits = values_MK.abs().max().view(torch.int16 if half else torch.int32).to(torch.int32)
    magnitude = bits & (0x7FFF if half else 0x7FFFFFFF)  # what is not a number has a sign, which a maximum may keep
    return torch.cat([magnitude.view(1), bits.new_zeros(PARTS - 1)])


def _cast(
    values_MK: Tensor,
    maxima_P: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if columns and by_kernel(values_MK) and not can_transpose(values_MK.dtype):
        cast_MK, _, inverse = _cast(values_MK, maxima_P, dtype, rows=True, columns=False)
        _, columns_KR, _ = _places(values_MK, dtype, rows=False, columns=True)
        transpose_into(columns_KR, cast_MK)
        return cast_MK if rows else cast_MK.new_empty(0), columns_KR, inverse
    rows_MK, columns_KR, inverse = _places(values_MK, dtype, rows=rows, columns=columns)
    if by_kernel(values_MK):
        from lightning_ups.kernels.float8_casts_triton import cast_launch

        places = rows_MK if rows else None, columns_KR if columns else None, inverse
        cast_launch(values_MK.contiguous(), maxima_P, *places).run(values_MK.device)
        return rows_MK, columns_KR, inverse
    largest = largest_of(dtype)
    bits = maxima_P.max()
    maximum = (bits.to(torch.int16) if values_MK.dtype.itemsize == 2 else bits).view(values_MK.dtype)
    scale = (largest / maximum.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    cast_MK = (values_MK.to(torch.float32) * scale).clamp(-largest, largest).to(dtype)
    if rows:
        rows_MK.copy_(cast_MK)
    if columns:
        transpose_into(columns_KR, cast_MK)
    inverse.copy_(scale.reciprocal())
    return rows_MK, columns_KR, inverse


def transpose_into(columns_KR: Tensor, cast_MK: Tensor) -> None:
    """Write the cast there transposed, and zeros behind it."""
    num_rows = cast_MK.shape[0]
    columns_KR.view(torch.uint8)[:, num_rows:].zero_()
    columns_KR[:, :num_rows].copy_(cast_MK.t())


def can_transpose(dtype: torch.dtype) -> bool:
    """Return whether the kernel turns values of this type around right.

    Those of four bytes Triton 3.6 mixes up on sm_90 on the way from the layout of loads to that of stores.
    """
    return dtype.itemsize == 2


def _places(values_MK: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a cast is written to; what is not asked for is empty."""
    num_rows, width = values_MK.shape
    return (
        values_MK.new_empty((num_rows, width) if rows else (0,), dtype=dtype),
        values_MK.new_empty((width, rounded_up(num_rows)) if columns else (0,), dtype=dtype),
        values_MK.new_empty((), dtype=torch.float32),
    )


def by_kernel(values_MK: Tensor) -> bool:
    """Return whether operators launch a kernel for these values."""
    return values_MK.device.type == "cuda" and HAS_KERNELS


def _rows(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows_MK, _, inverse = _cast(values_MK, maxima_P, dtype, rows=True, columns=False)
    return rows_MK, inverse


def _columns(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _, columns_KR, inverse = _cast(values_MK, maxima_P, dtype, rows=False, columns=True)
    return columns_KR, inverse


def _both(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _cast(values_MK, maxima_P, dtype, rows=True, columns=True)


def _fake_maxima(values_MK: Tensor) -> Tensor:
    return values_MK.new_empty(PARTS, dtype=torch.int32)


def _fake_rows(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    rows_MK, _, inverse = _places(values_MK, dtype, rows=True, columns=False)
    return rows_MK, inverse


def _fake_columns(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    _, columns_KR, inverse = _places(values_MK, dtype, rows=False, columns=True)
    return columns_KR, inverse


def _fake_both(values_MK: Tensor, maxima_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return _places(values_MK, dtype, rows=True, columns=True)


maxima = define_operator(_maxima, name="float8_maxima", fake=_fake_maxima)
"""Of `values_MK`: the bits of the largest magnitudes of its parts."""
row_order = define_operator(_rows, name="float8_rows", fake=_fake_rows)
"""Of `values_MK`, its maxima and a type of float8: the cast, and what its scale is undone by."""
column_order = define_operator(_columns, name="float8_columns", fake=_fake_columns)
"""Of the same: the cast, transposed, each row of that filled up with zeros, and what its scale is undone by."""
both_orders = define_operator(_both, name="float8_both", fake=_fake_both)
"""Of the same: all three, in one pass."""
