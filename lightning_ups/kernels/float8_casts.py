"""Casts of a matrix to float8 with one scale, in the two orders that products read, as opaque operators.

Compilers fuse such a cast with the code that computes the matrix, and recompute the matrix for its maximum. Here a
matrix is read twice, at memory speed: for its maximum, and for the cast, in both orders at once.

The values are bitwise equal to torchao's: ``largest / max(maximum, 1e-12)`` in float64 is the scale in float32.

Shape suffixes: M rows of K values, R is M rounded up to the size that products require, P parts of a maximum.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import has
from lightning_ups._compat.torch.tensors.custom_ops import define_operator

TYPES = (torch.bfloat16, torch.float16, torch.float32)
PARTS = 1024  # of a maximum; each program of a cast reads all of them
INNER = 16  # the dimension that is summed over must be a multiple of this
LEAST = 1e-12
HAS_KERNELS = torch.version.hip is None and has("triton")  # AMD GPUs have other float8 dtypes


def largest_of(dtype: torch.dtype) -> float:
    """Return the largest value of a float8 dtype."""
    return torch.finfo(dtype).max


def rounded_up(size: int) -> int:
    """Return ``size`` rounded up for the dimension that a product sums over.

    It is never zero: on some processors, empty products return uninitialized memory.
    """
    at_least: Any = torch.sym_max(size + INNER - 1, INNER)  # a graph may not know the size
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
    magnitude = bits & (0x7FFF if half else 0x7FFFFFFF)  # NaN has a sign, which a maximum may keep
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
    """Write the transposed cast into ``columns_KR``, followed by zeros."""
    num_rows = cast_MK.shape[0]
    columns_KR.view(torch.uint8)[:, num_rows:].zero_()
    columns_KR[:, :num_rows].copy_(cast_MK.t())


def can_transpose(dtype: torch.dtype) -> bool:
    """Return whether the kernel transposes values of this dtype correctly.

    Triton 3.6 on sm_90 mixes up values of four bytes between the layouts of loads and stores.
    """
    return dtype.itemsize == 2


def _places(values_MK: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of a cast; those that are not requested are empty."""
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
"""Return the bits of the largest magnitudes of parts of `values_MK`."""
row_order = define_operator(_rows, name="float8_rows", fake=_fake_rows)
"""Return the cast of `values_MK` to a float8 dtype, given its maxima, and the inverse scale."""
column_order = define_operator(_columns, name="float8_columns", fake=_fake_columns)
"""Return the same cast, transposed, with rows padded by zeros, and the inverse scale."""
both_orders = define_operator(_both, name="float8_both", fake=_fake_both)
"""Return both casts and the inverse scale, in one pass."""
