"""Which backend `auto` means: the fastest by measurement on this hardware, or a stated rule on hardware not measured.

`benchmarks/attention.py` measures a device and writes ``measured/DEVICE.json``; a table holds for every device of the
same compute capability, its own device's first. A shape between the measured ones gets, for each backend, the mean of
how far that backend was behind the best at the measured shapes, weighted by closeness; the least behind is chosen.

Where no table holds: on CPU flash, math, reference; on compute capability 9 and 10 cudnn, fa4, flash, flex,
efficient, math, reference; on other CUDA devices flash, cudnn, efficient, flex, math, reference; elsewhere math,
reference. The first that can do what is asked is chosen.
"""

import json
import logging
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from lightning_ups.kernels.attention.kind import Kind
from lightning_ups.kernels.attention.support import BACKENDS, KernelName, refusal

__all__ = [
    "Choice",
    "Row",
    "Table",
    "choose",
    "decide",
    "decisions",
    "parse_table",
    "predict",
    "rounded",
    "tables",
]

_logger = logging.getLogger(__name__)
_RULE_HOPPER_ON: tuple[KernelName, ...] = ("cudnn", "fa4", "flash", "flex", "efficient", "math", "reference")
_RULE_CUDA: tuple[KernelName, ...] = ("flash", "cudnn", "efficient", "flex", "math", "reference")
_RULE_CPU: tuple[KernelName, ...] = ("flash", "math", "reference")
_RULE_ELSEWHERE: tuple[KernelName, ...] = ("math", "reference")


class Row(NamedTuple):
    """Milliseconds of each backend for one shape."""

    head_dim: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    causal: bool
    forward: dict[KernelName, float]
    training: dict[KernelName, float]


class Table(NamedTuple):
    """What was measured on a device."""

    device: str
    capability: tuple[int, int]
    versions: dict[str, str]
    date: str
    rows: tuple[Row, ...]


class Choice(NamedTuple):
    """A backend, and why that one."""

    backend: KernelName
    why: str


# A choice holds for a cell of lengths (a quarter of an octave) and amounts of work, so that a function compiled for
# dynamic lengths is guarded by ranges and not by each length.
_FINE, _COARSE = 4, 2
_SEQ_FROM, _WORK_FROM = 7, 10
_SEQ_EDGES = tuple(math.ceil(2 ** (_SEQ_FROM + (i + 0.5) / _FINE)) for i in range(11 * _FINE))
_WORK_EDGES = tuple(math.ceil(2 ** (_WORK_FROM + (i + 0.5) / _COARSE)) for i in range(18 * _COARSE))


def choose(kind: Kind, *, batch: int, seq: int) -> KernelName:
    """Return the backend for ``batch`` rows of ``seq`` queries; inside a compiled function it is a constant.

    Raises:
        ValueError: If no backend can do it.
    """
    if kind.device != "cuda":
        return _chosen(tuple(kind), 0, 0)
    return _chosen(tuple(kind), _cell(seq, _SEQ_EDGES), _cell(batch * seq * kind.heads, _WORK_EDGES))


def decisions() -> list[dict[str, Any]]:
    """Return what was chosen by now in this process, for a manifest."""
    return [dict(decision) for decision in _decisions]


_decisions: list[dict[str, Any]] = []


def rounded(*, seq: int, work: int) -> tuple[float, float]:
    """Return the length and amount of work that `choose` decides for, in the place of these."""
    return _centre(_cell(seq, _SEQ_EDGES), _cell(work, _WORK_EDGES))


def _centre(seq_cell: int, work_cell: int) -> tuple[float, float]:
    return 2 ** (_SEQ_FROM + seq_cell / _FINE), 2 ** (_WORK_FROM + work_cell / _COARSE)


def _cell(value: int, edges: Sequence[int]) -> int:
    # By comparisons alone: `value` may be symbolic, and must not become a constant.
    low, high = 0, len(edges)
    while low < high:
        middle = (low + high) // 2
        if value >= edges[middle]:
            low = middle + 1
        else:
            high = middle
    return low


@torch.compiler.assume_constant_result
def _chosen(kind: tuple[Any, ...], seq_cell: int, work_cell: int) -> KernelName:
    return _choice(Kind(*kind), seq_cell, work_cell)


@cache
def _choice(kind: Kind, seq_cell: int, work_cell: int) -> KernelName:
    seq, work = _centre(seq_cell, work_cell)
    backend, why = decide(kind, seq=seq, work=work)
    decision = {"backend": backend, "why": why, "seq": round(seq), **kind._asdict(), "dtype": str(kind.dtype)}
    _decisions.append(decision)
    _logger.info("Attention (%s, about %d long) runs by backend %r: %s.", kind.dtype, seq, backend, why)
    return backend


def decide(kind: Kind, *, seq: float, work: float) -> Choice:
    """Return the backend for rows of ``seq`` queries, ``work`` being batch x seq x heads, and the reason for it."""
    capable: list[KernelName] = [backend for backend in BACKENDS if refusal(backend, kind) is None]
    if kind.device == "cuda" and (table := _table()):
        behind = predict(table, kind, seq=seq, work=work, among=capable)
        if behind:
            best = min(behind, key=behind.__getitem__)
            return Choice(best, f"fastest in the table of {table.device}, {table.date}")
    for backend in _rule(kind.device):
        if backend in capable:
            return Choice(backend, "first of the rule for hardware not measured that can do it")
    reasons = "; ".join(f"{backend}: {(refusal(backend, kind) or ('', ''))[0]}" for backend in BACKENDS)
    raise ValueError(
        f"No backend can do this attention. Each has its reason: {reasons}."
        " Change what is asked, a mask or dropout first."
    )


def predict(
    table: Table, kind: Kind, *, seq: float, work: float, among: Sequence[KernelName] = BACKENDS
) -> dict[KernelName, float]:
    """Return for each backend measured how far it is expected behind the best, as a logarithm of the ratio of times."""
    sums: dict[KernelName, float] = {}
    weights: dict[KernelName, float] = {}
    for row in table.rows:
        times = row.training if kind.trains or not row.forward else row.forward
        known: dict[KernelName, float] = {name: time for name, time in times.items() if name in among}
        if not known:
            continue
        weight = (_distance(row, kind, seq=seq, work=work) + 1e-3) ** -4
        best = min(known.values())
        for name, time in known.items():
            sums[name] = sums.get(name, 0.0) + weight * math.log(time / best)
            weights[name] = weights.get(name, 0.0) + weight
    most = max(weights.values(), default=0.0)
    # One that failed at the shapes nearby has no say from those far away.
    return {name: sums[name] / weights[name] for name in sums if weights[name] > most / 2}


def _distance(row: Row, kind: Kind, *, seq: float, work: float) -> float:
    # In octaves. Another width of heads, grouping or mask is further than any length.
    square = (math.log2(row.seq) - math.log2(seq)) ** 2
    square += (math.log2(row.batch * row.seq * row.heads) - math.log2(work)) ** 2 / 4
    square += 64 * (math.log2(row.head_dim) - math.log2(kind.head_dim)) ** 2
    square += 4 * (math.log2(row.heads / row.kv_heads) - math.log2(kind.heads / kind.kv_heads)) ** 2
    square += 64 * (row.causal != kind.causal)
    return math.sqrt(square)


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


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables that come with the package."""
    folder = files("lightning_ups.kernels.attention").joinpath("measured")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(parse_table(json.loads(entry.read_text())) for entry in found)


def parse_table(content: dict[str, Any]) -> Table:
    """Return the table that a file's content stands for."""
    rows = tuple(Row(**row) for row in content["rows"])
    major, minor = content["capability"]
    return Table(content["device"], (major, minor), content["versions"], content["date"], rows)
