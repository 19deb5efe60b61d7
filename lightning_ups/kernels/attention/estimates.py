"""Measured times of each backend per device, and what they say about other shapes.

`benchmarks/attention.py` measures a device and writes ``measured/DEVICE.json``. `Expected` estimates the time of each
backend for other shapes: its work divided by its speed, but at least the time that its host needs. The speed is a
weighted geometric mean over nearby measured shapes: it depends on the head dimension, the length, and on how many heads
and rows fill the device, and hardly on how heads share keys.

`find_regions` returns where each backend is the fastest: ranges of length, each with ranges of the number of query-key
pairs. A function compiled for dynamic lengths has guards on the ranges for which its choices were made, and is
recompiled outside of them. The ranges are therefore as wide as possible: lengths (in quarters of an octave) form one
range while one choice is expected to be within 3 % of the fastest for all of them. If all ranges agree for a number of
pairs, the guard does not depend on the length. Boundaries between pairs are exact, because a backend that waits for its
host takes as long for fewer pairs.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_ups.kernels.attention.support import BACKENDS, KernelName

# Distances are in octaves of length. A difference of one in another property counts as this many octaves:
_WIDTH, _FILLING, _GROUPING, _MASK = 4.0, 0.5, 0.25, 1.5
_ROUNDED = 1e-3  # keeps the weight of a measured shape itself finite

_SHORTEST, _LONGEST, _FINE = 5, 18, 4  # octaves of length, and cells per octave
_MOST_ROWS = 20  # octaves of rows x heads
_NEAR = 0.03
_NEVER = 1 << 62

Times = dict[KernelName, float]
Line = Callable[[float], Times]


class Row(NamedTuple):
    """Milliseconds of each backend for one shape."""

    head_dim: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    causal: bool
    forward: Times
    training: Times


class Table(NamedTuple):
    """The measurements of a device.

    Args:
        device: The name of the device.
        capability: Its compute capability.
        versions: The versions that the times depend on.
        date: The last day of the measurements.
        rows: The device's milliseconds.
        host: The host's milliseconds per call, by "training" or "forward" and backend.
    """

    device: str
    capability: tuple[int, int]
    versions: dict[str, str]
    date: str
    rows: tuple[Row, ...]
    host: dict[str, Times] = {}  # noqa: RUF012  (a NamedTuple's; nobody writes to it)


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables in the package."""
    folder = files("lightning_ups.kernels.attention").joinpath("measured")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(parse_table(json.loads(entry.read_text())) for entry in found)


def parse_table(content: dict[str, Any]) -> Table:
    """Return the table in the content of a file."""
    rows = tuple(Row(**row) for row in content["rows"])
    major, minor = content["capability"]
    return Table(content["device"], (major, minor), content["versions"], content["date"], rows, content.get("host", {}))


class Point(NamedTuple):
    """The properties of a shape that times depend on.

    Args:
        head_dim: The head dimension.
        grouping: The number of query heads per head of keys.
        causal: Whether keys after the query are hidden.
        length: The length of rows, or of documents.
        pairs: The number of query-key pairs, over all rows and heads; causal ones as if all were visible.
    """

    head_dim: int
    grouping: float
    causal: bool
    length: float
    pairs: float

    @property
    def work(self) -> float:
        """The work, to which the time is proportional."""
        return self.pairs * self.head_dim * (0.5 if self.causal else 1.0)

    @property
    def place(self) -> tuple[float, ...]:
        """Coordinates in octaves of length, except for `filling`."""
        width, grouping = _WIDTH * math.log2(self.head_dim), _GROUPING * math.log2(self.grouping)
        return math.log2(self.length), width, grouping, _MASK * self.causal

    @property
    def filling(self) -> float:
        """The coordinate for how much rows x heads fill the device."""
        return _FILLING * (math.log2(self.pairs) - 2 * math.log2(self.length))


def point_of(row: Row) -> Point:
    """Return the point of a measured shape."""
    pairs = row.batch * row.heads * row.seq**2
    return Point(row.head_dim, row.heads / row.kv_heads, row.causal, row.seq, pairs)


class Expected:
    """The expected times of all backends in ``rows``, with gradients (``trains``) or without.

    A row that was only measured with gradients counts for both. ``host`` has the milliseconds that the host of each
    backend needs for a call.

    Attributes:
        host: The same for each backend in ``rows``, or 0 if unknown.
        shortest: The shortest length in ``rows``.
    """

    def __init__(self, rows: Sequence[Row], *, trains: bool, host: Mapping[KernelName, float] | None = None) -> None:
        self.host: Times = {}
        self.shortest = min((row.seq for row in rows), default=0)
        self._rows: list[tuple[Point, Times]] = []  # with the logarithm of the time per work
        for row in rows:
            point, times = point_of(row), row.training if trains or not row.forward else row.forward
            self._rows.append((point, {name: math.log(time / point.work) for name, time in times.items()}))
            self.host |= {name: (host or {}).get(name, 0.0) for name in times}

    def milliseconds(self, point: Point, *, among: Sequence[KernelName] = BACKENDS) -> Times:
        """Return the time of each backend of ``among`` that was measured at the nearest shape."""
        return self.line(point, among=among)(point.pairs)

    def line(self, point: Point, *, among: Sequence[KernelName] = BACKENDS) -> Line:
        """Return a function that maps numbers of pairs, at the position of the point, to `milliseconds`."""
        place = point.place
        rows = [
            (math.dist(one.place, place) ** 2, one.filling, slowness)
            for one, slowness in self._rows
            if not slowness.keys().isdisjoint(among)
        ]

        def milliseconds(pairs: float) -> Times:
            here = point._replace(pairs=pairs)
            filling = here.filling
            weights = [(square + (filling - other) ** 2 + _ROUNDED) ** -1.5 for square, other, _ in rows]
            # A backend that failed at the nearest shape is not estimated from distant ones.
            nearest = rows[max(range(len(rows)), key=weights.__getitem__)][2]
            times: Times = {}
            for name in nearest.keys() & {*among}:
                known = [
                    (weight, slowness[name])
                    for weight, (_, _, slowness) in zip(weights, rows, strict=True)
                    if name in slowness
                ]
                mean = sum(weight * slow for weight, slow in known) / sum(weight for weight, _ in known)
                times[name] = max(self.host[name], here.work * math.exp(mean))
            return times

        return milliseconds


class Range(NamedTuple):
    """The choices for lengths from ``first`` to the next range: ``backends[i]`` for less than ``pairs[i]``."""

    first: int
    pairs: tuple[int, ...]
    backends: tuple[KernelName, ...]


class Regions(NamedTuple):
    """All choices: ``ranges``, which agree for less than ``low`` pairs, and for ``high`` pairs or more."""

    low: int
    high: int
    ranges: tuple[Range, ...]

    def at(self, *, length: float, pairs: float) -> KernelName:
        """Return the choice for a shape."""
        found = self.ranges[bisect_right([one.first for one in self.ranges], length) - 1]
        return found.backends[bisect_right(found.pairs, pairs)]


class _Cell:
    """One length, with times at each octave of pairs."""

    def __init__(self, length: float, times: Line) -> None:
        self.times = times
        self.known = {length**2 * 2**octave: times(length**2 * 2**octave) for octave in range(_MOST_ROWS + 1)}

    def fastest(self) -> Range:
        """Return the fastest choices for this length."""
        pairs: list[int] = []
        backends: list[KernelName] = [_fastest(next(iter(self.known.values())))]
        for (low, _), (high, times) in pairwise(self.known.items()):
            if (after := _fastest(times)) != backends[-1]:
                pairs.append(self._border(low, high))
                backends.append(after)
        return Range(0, tuple(pairs), tuple(backends))

    def takes(self, choices: Range) -> bool:
        """Return whether ``choices`` are close to the fastest here, at their boundaries and in between."""
        for pairs, times in self.known.items():
            if not _near(times, choices.backends[bisect_right(choices.pairs, pairs)]):
                return False
        inside = (index for index, pairs in enumerate(choices.pairs) if min(self.known) <= pairs <= max(self.known))
        for index in inside:
            times = self.times(choices.pairs[index])
            if not (_near(times, choices.backends[index]) and _near(times, choices.backends[index + 1])):
                return False
        return True

    def _border(self, low: float, high: float) -> int:
        before = _fastest(self.times(low))
        for _ in range(8):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _fastest(self.times(middle)) == before else (low, middle)
        return math.ceil(high)


def find_regions(line: Callable[[float], Line]) -> Regions:
    """Return the choices by ``line``, which maps a length to a function from numbers of pairs to times."""
    lengths = [2 ** (cell / _FINE) for cell in range(_SHORTEST * _FINE, _LONGEST * _FINE + 1)]
    cells = [_Cell(length, line(length)) for length in lengths]
    choices = [cell.fastest() for cell in cells]
    ranges: list[Range] = []
    start = 0
    while start < len(cells):
        end = start + 1
        while end < len(cells) and _share(cells[start : end + 1], choices[(start + end) // 2]):
            end += 1
        first = math.ceil(lengths[start] * 2 ** (-0.5 / _FINE)) if start else 0
        ranges.append(choices[(start + end - 1) // 2]._replace(first=first))
        start = end
    return Regions(_low(ranges), _high(ranges), tuple(ranges))


def _low(ranges: Sequence[Range]) -> int:
    # A row has at least its length squared pairs: with fewer, longer ranges do not occur.
    alike = [one for one in ranges if one.backends[0] == ranges[0].backends[0]]
    others = [one.first**2 for one in ranges if one not in alike]
    return min([one.pairs[0] for one in alike if one.pairs] + others, default=0)


def _high(ranges: Sequence[Range]) -> int:
    if len({one.backends[-1] for one in ranges}) > 1:
        return _NEVER
    return max((one.pairs[-1] for one in ranges if one.pairs), default=0)


def _share(cells: Sequence[_Cell], choices: Range) -> bool:
    return all(cell.takes(choices) for cell in cells)


def _near(times: Times, backend: KernelName) -> bool:
    return backend in times and times[backend] <= (1 + _NEAR) * min(times.values())


def _fastest(times: Times) -> KernelName:
    return min(times, key=times.__getitem__)
