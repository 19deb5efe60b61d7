"""Chooses the backend for `auto`: the fastest in measurements of this hardware, otherwise by a fixed order.

A table of measurements applies to all devices of its compute capability, preferably to its own device. `estimates.py`
estimates the time of each backend for other shapes; the fastest one that supports the call is chosen. Windows and
documents count by visible pairs, and as rows of their length; documents as if they had equal lengths. The host's time
to launch a call counts, except in CUDA graphs of `torch.compile`.

Without a table, the first that supports the call is chosen. On CPU: flash, math, reference; on compute capability 9 and
10: cudnn, fa4, flash, flex, efficient, math, reference; on other CUDA devices: flash, cudnn, efficient, flex, math,
reference; elsewhere: math, reference.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from lightning_ups._compat.contexts import ThreadStack
from lightning_ups._compat.torch.compile.dynamo import traces_for_cuda_graphs
from lightning_ups.kernels.attention.estimates import (
    Expected,
    Line,
    Point,
    Range,
    Regions,
    Table,
    Times,
    find_regions,
    tables,
)
from lightning_ups.kernels.attention.support import BACKENDS, KernelName, Kind, refusal

_logger = logging.getLogger(__name__)
_RULE_HOPPER_ON: tuple[KernelName, ...] = ("cudnn", "fa4", "flash", "flex", "efficient", "math", "reference")
_RULE_CUDA: tuple[KernelName, ...] = ("flash", "cudnn", "efficient", "flex", "math", "reference")
_RULE_CPU: tuple[KernelName, ...] = ("flash", "math", "reference")
_RULE_ELSEWHERE: tuple[KernelName, ...] = ("math", "reference")


_TORCHS: tuple[KernelName, ...] = ("cudnn", "flash", "efficient", "math")
_RULED = "first of the rule for hardware not measured that can do it"


class Extent(NamedTuple):
    """The length of the rows, and the number of pairs of a query and a key, over all rows and heads.

    Causal pairs are counted as if all were visible.
    """

    length: int
    pairs: int


def choose(
    kind: Kind,
    *,
    batch: int,
    seq: int,
    keys: int | None = None,
    window: int | None = None,
    documents: int | None = None,
) -> KernelName:
    """Return the backend for ``batch`` rows of ``seq`` queries; a constant in compiled functions.

    Args:
        kind: The kind of request.
        batch: Number of rows.
        seq: Queries per row.
        keys: Keys per row, if their number differs.
        window: Only keys less than this many positions away are visible.
        documents: Number of documents in all rows.

    Raises:
        ValueError: If no backend supports it.
    """
    told = tuple(kind)
    low, high = _everywhere(told)
    if high == 0:
        return _chosen(told, 0, 0)
    length, pairs = extent(kind, batch=batch, seq=seq, keys=keys, window=window, documents=documents)
    if pairs >= high:
        return _chosen(told, -1, -1)
    if pairs < low:
        return _chosen(told, 0, 0)
    column = _cell(length, _lengths(told)) - 1
    return _chosen(told, column, _cell(pairs, _borders(told, column)))


def extent(
    kind: Kind,
    *,
    batch: int,
    seq: int,
    keys: int | None = None,
    window: int | None = None,
    documents: int | None = None,
) -> Extent:
    """Return the sizes that a request's time depends on, besides its kind; see `choose`."""
    rows, length = (batch, seq) if documents is None else (documents, batch * seq // documents)
    if not kind.square and keys is not None:
        return Extent(keys, rows * kind.heads * length * keys)
    if window is not None and window < length:
        return Extent(window, rows * kind.heads * (2 * length * window - window * window))
    return Extent(length, rows * kind.heads * length * length)


Decisions = dict[tuple[Any, ...], dict[str, Any]]


def decisions() -> list[dict[str, Any]]:
    """Return the choices made so far in this process."""
    return [dict(decision) for decision in _DECIDED.values()]


@contextmanager
def recorded_decisions(on_growth: Callable[[], None] = lambda: None) -> Iterator[Decisions]:
    """Yield a record of this thread's choices while the context is open, including repeated ones.

    Args:
        on_growth: Called when the record has grown.
    """
    record = _Record({}, on_growth)
    with _RECORDS.holding(record):
        yield record.decisions


class _Record(NamedTuple):
    decisions: Decisions
    on_growth: Callable[[], None]


_DECIDED: Decisions = {}  # in this process
_RECORDS: ThreadStack[_Record] = ThreadStack()


def _cell(value: int, edges: Sequence[int]) -> int:
    # Only by comparisons: `value` may be symbolic, and must not become a constant.
    low, high = 0, len(edges)
    while low < high:
        middle = (low + high) // 2
        if value >= edges[middle]:
            low = middle + 1
        else:
            high = middle
    return low


@torch.compiler.assume_constant_result
def _everywhere(kind: tuple[Any, ...]) -> tuple[int, int]:
    found = _regions_now(kind)
    return found.low, found.high


@torch.compiler.assume_constant_result
def _lengths(kind: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(one.first for one in _regions_now(kind).ranges)


@torch.compiler.assume_constant_result
def _borders(kind: tuple[Any, ...], column: int) -> tuple[int, ...]:
    return _regions_now(kind).ranges[column].pairs


@torch.compiler.assume_constant_result
def _chosen(kind: tuple[Any, ...], column: int, cell: int) -> KernelName:
    backend = _regions_now(kind).ranges[column].backends[cell]
    decision = _decided(Kind(*kind), backend, replayed=traces_for_cuda_graphs())
    _DECIDED.setdefault((kind, backend), decision)
    for record in _RECORDS.values:
        if (kind, backend) not in record.decisions:
            record.decisions[kind, backend] = decision
            record.on_growth()
    return backend


def _regions_now(kind: tuple[Any, ...]) -> Regions:
    return regions(Kind(*kind), replayed=traces_for_cuda_graphs())


@cache
def _decided(kind: Kind, backend: KernelName, *, replayed: bool) -> dict[str, Any]:
    table = _measured(kind, _capable(kind))
    apart = ", its host left out, since CUDA graphs replay it" if replayed else ""
    why = f"fastest in the table of {table.device}, {table.date}{apart}" if table else _RULED
    heads = f"{kind.heads} heads of {kind.head_dim}"
    _logger.info("Attention (%s, %s) runs by backend %r: %s.", kind.dtype, heads, backend, why)
    return {"backend": backend, "why": why, **kind._asdict(), "dtype": str(kind.dtype)}


@cache
def regions(kind: Kind, *, replayed: bool = False) -> Regions:
    """Return the choices for all lengths and numbers of pairs.

    Args:
        kind: The kind of request.
        replayed: Whether CUDA graphs replay it, so that host time does not count.

    Raises:
        ValueError: If no backend supports it.
    """
    capable = _capable(kind)
    if table := _measured(kind, capable):
        return regions_of(
            expected_of(table, trains=kind.trains, replayed=replayed), kind, among=capable, order=_rule(kind.device)
        )
    return Regions(0, 0, (Range(0, (), (_first(kind, capable),)),))


def expected_of(table: Table, *, trains: bool, replayed: bool = False) -> Expected:
    """Return the times expected from ``table``, without host time if CUDA graphs replay a call."""
    host = None if replayed else table.host.get("training" if trains else "forward")
    return Expected(table.rows, trains=trains, host=host)


def regions_of(
    expected: Expected, kind: Kind, *, among: Sequence[KernelName], order: Sequence[KernelName] = ()
) -> Regions:
    """Return the choices among the backends ``among`` by ``expected`` times.

    Of rows less than half as long as any that was measured, torch's kernels are taken in ``order``.
    """
    grouping = kind.heads / kind.kv_heads
    own: list[KernelName] = [backend for backend in order if backend in _TORCHS and backend in among]

    def line(length: float) -> Line:
        times = expected.line(Point(kind.head_dim, grouping, kind.causal, length, length**2), among=among)
        return partial(_in_torchs_order, times, own) if own and length < expected.shortest / 2 else times

    return find_regions(line)


def _in_torchs_order(times: Line, own: Sequence[KernelName], pairs: float) -> Times:
    """Return times that choose the first of torch's ``own`` kernels before the others: for rows not measured."""
    known = times(pairs)
    best = min((ms for backend, ms in known.items() if backend in own), default=None)
    others: Times = {backend: ms for backend, ms in known.items() if backend not in own}
    return others if best is None else {**others, own[0]: best}


def _capable(kind: Kind) -> list[KernelName]:
    return [backend for backend in BACKENDS if refusal(backend, kind) is None]


def _measured(kind: Kind, among: Sequence[KernelName]) -> Table | None:
    table = _table() if kind.device == "cuda" else None
    known = {name for row in table.rows for name in row.training} if table else set()
    return table if known & set(among) else None


def _first(kind: Kind, capable: Sequence[KernelName]) -> KernelName:
    for backend in _rule(kind.device):
        if backend in capable:
            return backend
    reasons = "; ".join(f"{backend}: {(refusal(backend, kind) or ('', ''))[0]}" for backend in BACKENDS)
    raise ValueError(f"No attention backend supports this call. {reasons}. Change the call, its mask or dropout first.")


def _rule(device: str) -> tuple[KernelName, ...]:
    if device == "cpu":
        return _RULE_CPU
    if device != "cuda":
        return _RULE_ELSEWHERE
    return _RULE_HOPPER_ON if torch.cuda.get_device_capability()[0] in (9, 10) else _RULE_CUDA


@cache
def _table() -> Table | None:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    own = [table for table in tables() if table.device == name]
    kin = [table for table in tables() if table.capability == capability]
    return next(iter(own + kin), None)
