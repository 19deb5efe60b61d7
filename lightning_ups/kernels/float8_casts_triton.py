"""The Triton kernels of `float8_casts`: one computes a maximum, one casts tiles of a matrix."""
# ruff: noqa: ANN001, ANN201, D103, N803 (Triton reads the kernel's annotations, and it is no function of Python's)
# pyright: reportInvalidTypeForm=false

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_ups._compat.optional.packages import compiled
from lightning_ups._compat.optional.packages import language as tl
from lightning_ups._compat.torch.compile.graph_passes import find_where_written
from lightning_ups._compat.torch.compile.inductor import graph_pass
from lightning_ups._compat.torch.compile.launches import Launch, Operator
from lightning_ups.kernels.float8_casts import (
    LEAST,
    PARTS,
    both_orders,
    can_transpose,
    column_order,
    largest_of,
    maxima,
    row_order,
)

BLOCK, STAGES = 2048, 3
FAR = 2**31  # an offset that does not fit into 32 bits


class Tiles(NamedTuple):
    """The tiling of a cast.

    With one stage, Triton 3.6 for sm_90 transposes a tile of two-byte values by 8 x 8 matrices; with more, it reads
    tiles of 128 rows or more from shared memory value by value. With one stage, other programs hide the memory latency.

    Args:
        rows: Rows of a tile.
        columns: Columns of a tile.
        programs: Programs per multiprocessor: each processes several tiles.
        stages: Concurrent stages of loads.
    """

    rows: int = 128
    columns: int = 128
    programs: int = 64
    stages: int = 1

    def programs_on(self, device: torch.device, count: int) -> int:
        """Return the number of programs for ``count`` tiles on ``device``."""
        return max(1, min(count, self.programs * _multiprocessors(device)))


def maxima_launch(values_MK: Tensor, maxima_P: Tensor) -> Launch:
    """Return the launch that writes the bits of the largest magnitudes of parts; those of NaN are the largest."""
    arguments = {
        "values": values_MK,
        "maxima": maxima_P,
        "size": values_MK.numel(),
        "PARTS": PARTS,
        "HALF": values_MK.dtype.itemsize == 2,
        "BLOCK": BLOCK,
        "STAGES": STAGES,
    }
    return Launch(_maxima(), PARTS, arguments, written=("maxima",))


def cast_launch(
    values_MK: Tensor,
    maxima_P: Tensor,
    rows_MK: Tensor | None,
    columns_KR: Tensor | None,
    inverse: Tensor,
    *,
    tiles: Tiles | None = None,
) -> Launch:
    """Return the launch that writes the cast in the given orders, and the inverse scale."""
    tiles = tiles or Tiles()
    wanted = next(place for place in (rows_MK, columns_KR) if place is not None)
    num_rows, width = values_MK.shape
    length = num_rows if columns_KR is None else columns_KR.shape[1]
    across = -(-width // tiles.columns)
    count = -(-length // tiles.rows) * across
    arguments = {
        "values": values_MK,
        "maxima": maxima_P,
        "rows": maxima_P if rows_MK is None else rows_MK,  # not written to then
        "columns": maxima_P if columns_KR is None else columns_KR,
        "inverse": inverse,
        "num_rows": num_rows,
        "width": width,
        "length": length,
        "across": across,
        "count": count,
        "LARGEST": largest_of(wanted.dtype),
        "LEAST": LEAST,
        "PARTS": PARTS,
        "HALF": values_MK.dtype.itemsize == 2,
        "ROWS": rows_MK is not None,
        "COLUMNS": columns_KR is not None,
        "IS_FAR": max(tiles.rows * width, tiles.columns * length) >= FAR,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "STAGES": tiles.stages,
    }
    written = (*(["rows"] if rows_MK is not None else []), *(["columns"] if columns_KR is not None else []), "inverse")
    return Launch(_cast(), tiles.programs_on(values_MK.device, count), arguments, written)


def _launch_of_maxima(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch:
    return maxima_launch(inputs[0], outputs[0])


def _launch_of_rows(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch:
    return cast_launch(inputs[0], inputs[1], outputs[0], None, outputs[1])


def _launch_of_columns(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch | None:
    return cast_launch(inputs[0], inputs[1], None, *outputs) if can_transpose(inputs[0].dtype) else None


def _launch_of_both(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Launch | None:
    return cast_launch(inputs[0], inputs[1], *outputs) if can_transpose(inputs[0].dtype) else None


OPERATORS = (
    Operator(maxima, _launch_of_maxima),
    Operator(row_order, _launch_of_rows),
    Operator(column_order, _launch_of_columns),
    Operator(both_orders, _launch_of_both),
)
"""The operators that compiled graphs can launch themselves."""


@contextmanager
def maxima_where_written() -> Iterator[None]:
    """Let graphs compiled in this context compute maxima in inductor's kernels that write matrices.

    Open `launched_by_graphs` inside of this context.
    """
    with graph_pass("apart", _find_where_written, sources=(inspect.getfile(find_where_written),)):
        yield


def _find_where_written(graph: fx.Graph) -> None:
    find_where_written(graph, maxima)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _maxima() -> Any:
    return compiled(maxima_kernel, feature="the maximum of a matrix in one kernel")


@cache
def _cast() -> Any:
    return compiled(cast_kernel, feature="a cast to float8 in one kernel")


def maxima_kernel(
    values,
    maxima,
    size,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(0)
    # Magnitudes have the order of their bits, with NaN last: the maximum of values with a NaN is NaN.
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(part.to(tl.int64) * BLOCK, size, PARTS * BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(values + at, mask=at < size, other=0.0)
        if HALF:
            bits = found.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        else:
            bits = found.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, bits)
    tl.store(maxima + part, tl.max(largest, axis=0))


def cast_kernel(
    values,
    maxima,
    rows,
    columns,
    inverse,
    num_rows,
    width,
    length,
    across,
    count,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FAR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    bits = tl.max(tl.load(maxima + tl.arange(0, PARTS)), axis=0)
    if HALF:
        maximum = bits.to(tl.int16).to(values.dtype.element_ty, bitcast=True).to(tl.float64)
    else:
        maximum = bits.to(tl.float32, bitcast=True).to(tl.float64)
    least = tl.full((), LEAST, tl.float64)
    scale = (LARGEST / tl.where(maximum < least, least, maximum)).to(tl.float32)
    first = tl.program_id(0)
    if first == 0:
        tl.store(inverse, (1.0 / scale.to(tl.float64)).to(tl.float32))
    row = tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    if IS_FAR:  # from one side of a tile to the other
        row, column = row.to(tl.int64), column.to(tl.int64)
    for tile in tl.range(first, count, tl.num_programs(0), num_stages=STAGES):
        row_0, column_0 = (tile // across) * TILE_ROWS, (tile % across) * TILE_COLUMNS
        inside = (column_0 + column) < width
        here = ((row_0 + row) < num_rows) & inside
        by_rows = row_0.to(tl.int64) * width + column_0
        found = tl.load(values + by_rows + (row * width + column), mask=here, other=0.0).to(tl.float32) * scale
        if ROWS:
            tl.store(rows + by_rows + (row * width + column), found.to(rows.dtype.element_ty), mask=here)
        if COLUMNS:
            by_columns = column_0.to(tl.int64) * length + row_0
            cast = found.to(columns.dtype.element_ty)
            tl.store(columns + by_columns + (column * length + row), cast, mask=((row_0 + row) < length) & inside)
