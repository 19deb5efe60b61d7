"""Casts of a matrix to float8 with a scale per row, or per column and transposed, as operators.

A row is read once: its maximum, scale and cast are computed in registers. Columns are read twice. A compiler would turn
such casts into loops that write intermediate values to memory in float32, and compute a scale for each value.

The values are bitwise equal to torchao's: ``largest / max(maximum, 1e-12)`` in float64, cast to float32, rounded down
to a power of two. Torchao uses a logarithm in float32 for that, which may round up for maxima of float32 values.

Shape suffixes: M rows of K values, R is M rounded up to the size that products require, P parts of the rows.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.custom_ops import define_operator
from lightning_ups.kernels.float8_casts import LEAST, by_kernel, can_transpose, largest_of, rounded_up, transpose_into

PARTS = 64  # of the rows, each with a maximum of every column


def scales_of(bits: Tensor, of: torch.dtype, to: torch.dtype) -> Tensor:
    """Return the factors by which values are multiplied before they are cast.

    Args:
        bits: The bits of the largest magnitudes, as 32-bit integers.
        of: The dtype of the values.
        to: The float8 dtype.
    """
    maximum = (bits.to(torch.int16) if of.itemsize == 2 else bits).view(of).to(torch.float64)
    scale = (largest_of(to) / maximum.clamp(min=LEAST)).to(torch.float32)
    return torch.where(scale.isnan(), scale, (scale.view(torch.int32) & 0x7F800000).view(torch.float32))


def _largest_bits(values_MK: Tensor, *, dim: int) -> Tensor:
    half = values_MK.dtype.itemsize == 2
    bits = values_MK.abs().amax(dim).view(torch.int16 if half else torch.int32).to(torch.int32)
    return bits & (0x7FFF if half else 0x7FFFFFFF)  # NaN has a sign, which a maximum may keep


def _cast(values_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = largest_of(dtype)
    return (values_MK.to(torch.float32) * scale).clamp(-largest, largest).to(dtype)


def _scaled_rows(values_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows_MK, inverse_M = _fake_scaled_rows(values_MK, dtype)
    if by_kernel(values_MK):
        from lightning_ups.kernels.float8_row_casts_triton import rows_launch

        rows_launch(values_MK.contiguous(), rows_MK, inverse_M).run(values_MK.device)
        return rows_MK, inverse_M
    scale_M = scales_of(_largest_bits(values_MK, dim=1), values_MK.dtype, dtype)
    rows_MK.copy_(_cast(values_MK, scale_M[:, None], dtype))
    inverse_M.copy_(scale_M.reciprocal())
    return rows_MK, inverse_M


def _column_maxima(values_MK: Tensor) -> Tensor:
    maxima_PK = _fake_column_maxima(values_MK)
    if by_kernel(values_MK):
        from lightning_ups.kernels.float8_row_casts_triton import column_maxima_launch

        column_maxima_launch(values_MK.contiguous(), maxima_PK).run(values_MK.device)
        return maxima_PK
    maxima_PK.zero_()
    if len(values_MK) > 0:
        maxima_PK[0] = _largest_bits(values_MK, dim=0)
    return maxima_PK


def _scaled_columns(values_MK: Tensor, scale_K: Tensor, dtype: torch.dtype) -> Tensor:
    columns_KR = _fake_scaled_columns(values_MK, scale_K, dtype)
    if by_kernel(values_MK) and can_transpose(values_MK.dtype):
        from lightning_ups.kernels.float8_row_casts_triton import columns_launch

        columns_launch(values_MK.contiguous(), scale_K.contiguous(), columns_KR).run(values_MK.device)
        return columns_KR
    transpose_into(columns_KR, _cast(values_MK, scale_K, dtype))
    return columns_KR


def _fake_scaled_rows(values_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows, width = values_MK.shape
    rows_MK = values_MK.new_empty(num_rows, width, dtype=dtype)
    return rows_MK, values_MK.new_empty(num_rows, dtype=torch.float32)


def _fake_column_maxima(values_MK: Tensor) -> Tensor:
    return values_MK.new_empty(PARTS, values_MK.shape[1], dtype=torch.int32)


def _fake_scaled_columns(values_MK: Tensor, scale_K: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    num_rows, width = values_MK.shape
    return values_MK.new_empty(width, rounded_up(num_rows), dtype=dtype)


scaled_rows = define_operator(_scaled_rows, name="float8_scaled_rows", fake=_fake_scaled_rows)
"""Return the cast of `values_MK` to a float8 dtype, and the inverse scale of each row."""
column_maxima = define_operator(_column_maxima, name="float8_column_maxima", fake=_fake_column_maxima)
"""Return the bits of the largest magnitudes of the columns of `values_MK`, in parts of the rows."""
scaled_columns = define_operator(_scaled_columns, name="float8_scaled_columns", fake=_fake_scaled_columns)
"""Return the transposed cast of `values_MK`, given a scale for each column, with rows padded by zeros."""
