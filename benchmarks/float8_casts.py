"""Casts to float8 on this GPU: what their kernels move a second, by size of their tiles, beside the compiler's.

    python benchmarks/float8_casts.py --output benchmarks/results/DATE_float8_casts

Matrices are those of the 1.5 B GPT (16384 rows), of 8 B, and of ViT-L. `maxima` reads a matrix; `rows` and `columns`
read it and write one byte a value, `both` two. A figure is the median of seven times the mean of 20 launches, between
CUDA events, of a recording that is replayed: the host has no part in it. TB/s counts what has to be moved, once. Of
each kernel the quickest setting comes first, and all are kept. `inductor` is what `torch.compile` makes of the same by
torch's operators: the maximum, and a cast in both orders. `scaled_rows`, `column_maxima` and `scaled_columns` are of
scales for rows and columns, and `inductor_rows` is what the compiler makes of the first. `host` has the microseconds
that an operator takes of the host, called 2000 times on a small matrix. `products` are the two of a backward pass, of
layers of the 1.5 B and the 8 B GPT, with gradients in e4m3 and in e5m2: microseconds, and the one over the other; and
what they would be with sums of fewer bits, and by how much the gradient of a weight would then differ.

Without a GPU the tiny cases run by the specification, which tries the script out.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from cases import main
from torch import Tensor

from lightning_ups.kernels.float8_casts import both_orders, column_order, largest_of, maxima, row_order
from lightning_ups.kernels.float8_row_casts import column_maxima, scaled_columns, scaled_rows, scales_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FORM = torch.float8_e4m3fn
SHAPES = (
    ((16384, 2048), (16384, 8192), (16384, 4096), (16384, 14336), (25216, 1024), (25216, 4096), (8192, 2048))
    if ON_GPU
    else ((32, 48),)
)
PRODUCTS = (
    tuple(
        (rows, *sizes)
        for rows, model in (
            (16384, ((2048, 2048), (2048, 8192), (8192, 2048))),
            (2048, ((4096, 4096), (4096, 14336), (14336, 4096))),
            (16384, ((4096, 4096), (4096, 14336), (14336, 4096))),
        )
        for sizes in model
    )
    if ON_GPU
    else ((32, 16, 48),)
)
LAUNCHES, ROUNDS = 20, 7
BYTES = {"maxima": 2, "rows": 3, "columns": 3, "both": 4, "inductor": 6} | {
    "scaled_rows": 3, "column_maxima": 2, "scaled_columns": 3, "inductor_rows": 3
}  # fmt: skip
TILES = tuple(
    (rows, columns, programs, stages)
    for rows, columns in ((64, 64), (64, 128), (128, 64), (128, 128))
    for programs, stages in ((4, 1), (8, 1), (16, 1), (64, 1), (4, 3))
)
BLOCKS = tuple(itertools.product((1024, 2048, 4096, 8192), (1, 3)))


def milliseconds(call: Callable[[], Any]) -> float:
    """Return how long the device takes for a call."""
    if not ON_GPU:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def matrix(shape: tuple[int, int]) -> Tensor:
    """Return random values of a matrix."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def quickest(kind: str, ways: Mapping[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    """Time ``ways`` of doing the same for each shape, and return all of them, the quickest of each shape by name."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        values, times = matrix(shape), dict[str, float]()
        for name, way in ways.items():
            try:
                times[name] = milliseconds(partial(way, values))
            except Exception as error:  # noqa: BLE001  (a tile that does not fit, in whatever words)
                print(f"{shape} {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
        if not times:
            continue
        order = sorted(times, key=lambda name: times[name])
        speeds = {name: round(BYTES[kind] * values.numel() / times[name] / 1e9, 3) for name in order}
        print(f"{kind} {shape}: {speeds}", flush=True)
        found[f"{shape[0]}x{shape[1]}"] = {"ms": round(times[order[0]], 4), "TB_s": speeds}
    if not found:
        raise SystemExit(f"No way of {kind} ran: what each said stands above.")
    first = next(iter(found.values()))
    return {"kind": kind, "TB_s": next(iter(first["TB_s"].values())), "of": next(iter(first["TB_s"])), "shapes": found}


def maxima_by_blocks() -> dict[str, Any]:
    """Time the look for a maximum, by size of its blocks."""
    if not ON_GPU:
        return quickest("maxima", {"reference": maxima})

    from lightning_ups.kernels import float8_casts_triton as kernels

    def way(values: Tensor, block: int, stages: int) -> Tensor:
        kernels.BLOCK, kernels.STAGES = block, stages
        return maxima(values)

    plain = (kernels.BLOCK, kernels.STAGES)
    blocks = dict.fromkeys((plain, *BLOCKS))
    return quickest("maxima", {str(b): partial(way, block=b[0], stages=b[1]) for b in blocks})


def casts_by_tiles(kind: str) -> dict[str, Any]:
    """Time a cast, by size of its tiles."""
    operator = {"rows": row_order, "columns": column_order, "both": both_orders}[kind]
    if not ON_GPU:
        return quickest(kind, {"reference": lambda values: operator(values, maxima(values), FORM)})

    from lightning_ups.kernels import float8_casts, float8_casts_triton
    from lightning_ups.kernels.float8_casts_triton import Tiles

    found: dict[int, Tensor] = {}  # the maxima of a matrix, which are no part of a cast

    def way(values: Tensor, tiles: Tiles) -> Any:
        if values.data_ptr() not in found:
            found.clear()
            found[values.data_ptr()] = maxima(values)
        places = float8_casts._places(values, FORM, rows=kind != "columns", columns=kind != "rows")
        rows, columns = (None if place.numel() == 0 else place for place in places[:2])
        known = found[values.data_ptr()]
        float8_casts_triton.cast_launch(values, known, rows, columns, places[2], tiles=tiles).run(values.device)
        return places

    sizes = dict.fromkeys((tuple(Tiles()), *TILES))
    return quickest(kind, {str(size): partial(way, tiles=Tiles(*size)) for size in sizes})


def rows_by_tiles() -> dict[str, Any]:
    """Time a cast by scales of rows, by how many values a program holds of short rows and of long ones."""
    if not ON_GPU:
        return quickest("scaled_rows", {"reference": lambda values: scaled_rows(values, FORM)})

    from lightning_ups.kernels import float8_row_casts_triton as kernels

    def way(values: Tensor, tile: int, widest: int) -> Any:
        kernels.TILE, kernels.WIDEST = tile, widest
        return scaled_rows(values, FORM)

    sizes = dict.fromkeys(((kernels.TILE, kernels.WIDEST), *itertools.product((2048, 4096, 8192), (4096, 8192, 16384))))
    return quickest("scaled_rows", {str(size): partial(way, tile=size[0], widest=size[1]) for size in sizes})


def column_maxima_by_tiles() -> dict[str, Any]:
    """Time the look for the maxima of columns, by what a program has under way."""
    if not ON_GPU:
        return quickest("column_maxima", {"reference": column_maxima})

    from lightning_ups.kernels import float8_row_casts_triton as kernels

    def way(values: Tensor, rows: int, columns: int, stages: int) -> Tensor:
        kernels.ROWS, kernels.COLUMNS, kernels.STAGES = rows, columns, stages
        return column_maxima(values)

    plain = (kernels.ROWS, kernels.COLUMNS, kernels.STAGES)
    sizes = dict.fromkeys((plain, *itertools.product((16, 32), (128, 256, 512), (1, 2, 4))))
    return quickest("column_maxima", {str(size): partial(way, **_named(size)) for size in sizes})


def _named(size: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("rows", "columns", "stages"), size, strict=True))


def columns_by_tiles() -> dict[str, Any]:
    """Time a cast by scales of columns, transposed, by size of its tiles."""
    scales: dict[int, Tensor] = {}  # of a matrix, which are no part of a cast

    def scale_of(values: Tensor) -> Tensor:
        if values.data_ptr() not in scales:
            scales.clear()
            scales[values.data_ptr()] = scales_of(column_maxima(values).amax(0), values.dtype, FORM)
        return scales[values.data_ptr()]

    if not ON_GPU:
        return quickest("scaled_columns", {"reference": lambda values: scaled_columns(values, scale_of(values), FORM)})

    from lightning_ups.kernels.float8_casts_triton import Tiles
    from lightning_ups.kernels.float8_row_casts_triton import COLUMN_TILES, columns_launch

    def way(values: Tensor, tiles: Tiles) -> Tensor:
        place = values.new_empty(values.shape[1], values.shape[0], dtype=FORM)
        columns_launch(values, scale_of(values), place, tiles=tiles).run(values.device)
        return place

    sizes = dict.fromkeys((tuple(COLUMN_TILES), *TILES))
    return quickest("scaled_columns", {str(size): partial(way, tiles=Tiles(*size)) for size in sizes})


def rows_by_inductor() -> dict[str, Any]:
    """Time a cast by scales of rows by what `torch.compile` makes of torch's operators."""
    largest = largest_of(FORM)

    def cast(values: Tensor) -> tuple[Tensor, Tensor]:
        most = values.abs().amax(1, keepdim=True).to(torch.float64).clamp(min=1e-12)
        scale = torch.exp2(torch.floor(torch.log2((largest / most).to(torch.float32))))
        return (values.to(torch.float32) * scale).to(FORM), scale.reciprocal()

    return quickest("inductor_rows", {"compiled": torch.compile(cast, dynamic=False) if ON_GPU else cast})


def by_inductor() -> dict[str, Any]:
    """Time the maximum and the cast in both orders by what `torch.compile` makes of torch's operators."""
    largest = largest_of(FORM)

    def cast(values: Tensor) -> tuple[Tensor, Tensor]:
        scale = (largest / values.abs().max().to(torch.float64).clamp(min=1e-12)).to(torch.float32)
        rows = (values.to(torch.float32) * scale).to(FORM)
        return rows, rows.t().contiguous()

    return quickest("inductor", {"compiled": torch.compile(cast, dynamic=False) if ON_GPU else cast})


def on_the_host() -> dict[str, Any]:
    """Time what an operator takes of the host, in microseconds."""
    values, count = matrix((64, 64)), 2000 if ON_GPU else 5
    known = maxima(values)
    calls: Iterable[tuple[str, Callable[[], Any]]] = (
        ("maxima", lambda: maxima(values)),
        ("both", lambda: both_orders(values, known, FORM)),
    )
    found: dict[str, Any] = {"kind": "host"}
    for name, call in calls:
        call()
        began = time.perf_counter()
        for _ in range(count):
            call()
        found[f"{name}_us"] = round((time.perf_counter() - began) / count * 1e6, 2)
    return found


def products_by_format() -> dict[str, Any]:
    """Time the products of a backward pass by the format of gradients, in microseconds."""
    ways = {"e4m3": (FORM, False), "e5m2": (torch.float8_e5m2, False), "e4m3, fast sums": (FORM, True)}
    found: dict[str, Any] = {}
    for rows, inner, outer in PRODUCTS:
        weight, values = matrix((inner, outer)).to(FORM), matrix((inner, rows)).to(FORM)
        across, down = matrix((rows, outer)), matrix((outer, rows))
        times = {
            name: round(1e3 * milliseconds(partial(_both, across.to(form), down.to(form), weight, values, fast)), 2)
            for name, (form, fast) in ways.items()
        }
        exact, fast = (_both(across.to(FORM), down.to(FORM), weight, values, way)[1].float() for way in (False, True))
        times["e4m3 to e5m2"] = round(times["e4m3"] / times["e5m2"], 3)
        times["fast sums off by"] = float(f"{((fast - exact).norm() / exact.norm()).item():.3g}")
        print(f"{rows} rows, {inner} to {outer}: {times}", flush=True)
        found[f"{rows}x{inner}x{outer}"] = times
    return {"kind": "products", "shapes": found}


def _both(across: Tensor, down: Tensor, weight: Tensor, values: Tensor, fast: bool) -> list[Tensor]:  # noqa: FBT001
    """Return the gradients of an input and of a weight."""
    one = torch.ones((), device=DEVICE)
    return [
        torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        for left, right in ((across, weight), (down, values))
    ]


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "maxima": maxima_by_blocks,
    **{kind: partial(casts_by_tiles, kind) for kind in ("both", "rows", "columns")},
    "inductor": by_inductor,
    "scaled_rows": rows_by_tiles,
    "column_maxima": column_maxima_by_tiles,
    "scaled_columns": columns_by_tiles,
    "inductor_rows": rows_by_inductor,
    "host": on_the_host,
    "products": products_by_format,
}

if __name__ == "__main__":
    main(CASES, columns=("TB_s", "of", "maxima_us", "both_us"))
