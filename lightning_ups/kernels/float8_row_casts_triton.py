"""The Triton kernels of `float8_row_casts`: casts of rows, maxima of columns, and casts of columns."""
# ruff: noqa: ANN001, ANN201, D103, N803 (Triton reads the kernel's annotations, and it is no function of Python's)
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from lightning_ups._compat.optional.packages import compiled
from lightning_ups._compat.optional.packages import language as tl
from lightning_ups._compat.torch.compile.launches import Launch, Operator
from lightning_ups.kernels.float8_casts import LEAST, can_transpose, largest_of
from lightning_ups.kernels.float8_casts_triton import FAR, Tiles
from lightning_ups.kernels.float8_row_casts import PARTS, column_maxima, scaled_columns, scaled_rows

TILE = 4096  # values of short rows per program
WIDEST = 16384  # two-byte values of a row that a program can hold
ROWS, COLUMNS, STAGES = 16, 512, 4  # tile size of the kernel for maxima of columns
COLUMN_TILES = Tiles(columns=64)


def rows_launch(values_MK: Tensor, rows_MK: Tensor, inverse_M: Tensor) -> Launch:
    """Return the launch that writes the cast by rows, and the inverse scale of each."""
    num_rows, width = values_MK.shape
    is_whole = width * values_MK.dtype.itemsize <= 2 * WIDEST
    block = _power_of_two(width) if is_whole else TILE  # of a row; the first is kept, and others are read again
    rows = max(1, TILE // block)
    arguments = {
        "values": values_MK,
        "rows": rows_MK,
        "inverse": inverse_M,
        "num_rows": num_rows,
        "width": width,
        "LARGEST": largest_of(rows_MK.dtype),
        "LEAST": LEAST,
        "HALF": values_MK.dtype.itemsize == 2,
        "WHOLE": is_whole,
        "ROWS": rows,
        "BLOCK": block,
    }
    return Launch(_rows(), max(1, -(-num_rows // rows)), arguments, written=("rows", "inverse"))


def column_maxima_launch(values_MK: Tensor, maxima_PK: Tensor) -> Launch:
    """Return the launch that writes the bits of the largest magnitudes of columns; those of NaN are the largest."""
    num_rows, width = values_MK.shape
    across = -(-width // COLUMNS)
    arguments = {
        "values": values_MK,
        "maxima": maxima_PK,
        "num_rows": num_rows,
        "width": width,
        "across": across,
        "rows_each": -(-num_rows // (PARTS * ROWS)) * ROWS,
        "HALF": values_MK.dtype.itemsize == 2,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "STAGES": STAGES,
    }
    return Launch(_column_maxima(), PARTS * across, arguments, written=("maxima",))


def columns_launch(values_MK: Tensor, scale_K: Tensor, columns_KR: Tensor, *, tiles: Tiles = COLUMN_TILES) -> Launch:
    """Return the launch that writes the cast by columns, transposed."""
    num_rows, width = values_MK.shape
    length = columns_KR.shape[1]
    across = -(-width // tiles.columns)
    count = -(-length // tiles.rows) * across
    arguments = {
        "values": values_MK,
        "scales": scale_K,
        "columns": columns_KR,
        "num_rows": num_rows,
        "width": width,
        "length": length,
        "across": across,
        "count": count,
        "IS_FAR": max(tiles.rows * width, tiles.columns * length) >= FAR,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "STAGES": tiles.stages,
    }
    return Launch(_columns(), tiles.programs_on(values_MK.device, count), arguments, written=("columns",))


def _launch_of_rows(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch:
    return rows_launch(inputs[0], *outputs)


def _launch_of_column_maxima(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch:
    return column_maxima_launch(inputs[0], outputs[0])


def _launch_of_columns(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch | None:
    return columns_launch(inputs[0], inputs[1], outputs[0]) if can_transpose(inputs[0].dtype) else None


OPERATORS = (
    Operator(scaled_rows, _launch_of_rows),
    Operator(column_maxima, _launch_of_column_maxima),
    Operator(scaled_columns, _launch_of_columns),
)
"""The operators that compiled graphs can launch themselves."""


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _rows() -> Any:
    return compiled(rows_kernel, feature="a cast to float8 by rows in one kernel")


@cache
def _column_maxima() -> Any:
    return compiled(column_maxima_kernel, feature="the maxima of columns in one kernel")


@cache
def _columns() -> Any:
    return compiled(columns_kernel, feature="a cast to float8 by columns in one kernel")


def rows_kernel(
    values,
    rows,
    inverse,
    num_rows,
    width,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    is_row = row < num_rows
    at = row.to(tl.int64)[:, None] * width + column
    here = is_row[:, None] & (column < width)
    first = tl.load(values + at, mask=here, other=0.0)
    # Magnitudes have the order of their bits, with NaN last: the maximum of values with a NaN is NaN.
    if HALF:
        bits = first.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not WHOLE:
        for start in tl.range(BLOCK, width, BLOCK):
            found = tl.load(values + at + start, mask=is_row[:, None] & (start + column < width), other=0.0)
            if HALF:
                bits = tl.maximum(bits, found.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)
            else:
                bits = tl.maximum(bits, found.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, axis=1)
    if HALF:
        maximum = largest.to(tl.int16).to(values.dtype.element_ty, bitcast=True).to(tl.float64)
    else:
        maximum = largest.to(tl.float32, bitcast=True).to(tl.float64)
    least = tl.full((), LEAST, tl.float64)
    exact = (LARGEST / tl.where(maximum < least, least, maximum)).to(tl.float32)
    power = (exact.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(exact != exact, exact, power)  # NaN would become infinity
    tl.store(inverse + row, 1.0 / scale, mask=is_row)
    tl.store(rows + at, (first.to(tl.float32) * scale[:, None]).to(rows.dtype.element_ty), mask=here)
    if not WHOLE:
        for start in tl.range(BLOCK, width, BLOCK):
            here = is_row[:, None] & (start + column < width)
            found = tl.load(values + at + start, mask=here, other=0.0)
            cast = (found.to(tl.float32) * scale[:, None]).to(rows.dtype.element_ty)
            tl.store(rows + at + start, cast, mask=here)


def column_maxima_kernel(
    values,
    maxima,
    num_rows,
    width,
    across,
    rows_each,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    first = part * rows_each + tl.arange(0, ROWS)[:, None]
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        row = first + start
        here = (row < num_rows) & (column < width)[None, :]
        found = tl.load(values + row.to(tl.int64) * width + column[None, :], mask=here, other=0.0)
        if HALF:
            largest = tl.maximum(largest, found.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)
        else:
            largest = tl.maximum(largest, found.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(maxima + part * width + column, tl.max(largest, axis=0), mask=column < width)


def columns_kernel(
    values,
    scales,
    columns,
    num_rows,
    width,
    length,
    across,
    count,
    IS_FAR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    if IS_FAR:  # from one side of a tile to the other
        row, column = row.to(tl.int64), column.to(tl.int64)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=STAGES):
        row_0, column_0 = (tile // across) * TILE_ROWS, (tile % across) * TILE_COLUMNS
        inside = (column_0 + column) < width
        here = ((row_0 + row) < num_rows) & inside
        scale = tl.load(scales + column_0 + column, mask=inside, other=0.0)
        by_rows = row_0.to(tl.int64) * width + column_0
        found = tl.load(values + by_rows + (row * width + column), mask=here, other=0.0).to(tl.float32) * scale
        by_columns = column_0.to(tl.int64) * length + row_0
        cast = found.to(columns.dtype.element_ty)
        tl.store(columns + by_columns + (column * length + row), cast, mask=((row_0 + row) < length) & inside)
