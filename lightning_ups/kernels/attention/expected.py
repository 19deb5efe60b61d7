"""How long each backend is expected to take for a shape, from the shapes that were measured.

A backend's time is its work over its speed, and never less than the time that its host needs. The speed is that of
the measured shapes nearby, their logarithms weighted by closeness: it hangs on the width of heads, on the length, on
how many heads and rows keep the device busy, and hardly on how heads share keys. What a measured shape took beside
what is expected of it counts for its close neighbours.

A table that says what the hosts need has the device's times alone. In one that does not, the host is seen where a row's
time tells of it, and not of the speed: the same width of heads ran much faster with more to do at no greater length.
The upper quartile of such times is the host's: a host that has other work too is late rather than early.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lightning_ups.kernels.attention.support import BACKENDS, KernelName
from lightning_ups.kernels.attention.table import Row

__all__ = ["Expected", "Point", "point_of"]

# Distances are in octaves of length. One in another respect is as far as so many of length:
_WIDTH, _COUNT, _GROUPING, _MASK = 4.0, 0.5, 0.25, 1.5
_LATE = 1.25  # a row that is slower than this, beside one with more work, waited for its host
_LATE_ROWS = 3  # so many must have waited, to tell host time from a slow shape
_NEIGHBOUR = 0.25  # a neighbour is nearer
_ROUNDED = 1e-3  # so that what was measured at the very place does not weigh infinitely


class Point(NamedTuple):
    """A shape as times depend on it.

    Args:
        head_dim: Width of a head.
        grouping: Query heads to one head of keys.
        causal: No key after the query is seen.
        length: Of rows, or of documents.
        pairs: Of a query and a key, over all rows and heads; causal ones are counted as if all were seen.
    """

    head_dim: int
    grouping: float
    causal: bool
    length: float
    pairs: float

    @property
    def work(self) -> float:
        """What the time is proportional to."""
        return self.pairs * self.head_dim * (0.5 if self.causal else 1.0)


def point_of(row: Row) -> Point:
    """Return where a measured shape lies."""
    pairs = row.batch * row.heads * row.seq**2
    return Point(row.head_dim, row.heads / row.kv_heads, row.causal, row.seq, pairs)


class _Place(NamedTuple):
    # In octaves of length: how far two shapes are from each other is the length of their difference.
    length: float
    width: float
    grouping: float
    mask: float
    filling: float  # by rows x heads


def _place(point: Point) -> _Place:
    length, filling = math.log2(point.length), _COUNT * (math.log2(point.pairs) - 2 * math.log2(point.length))
    width, grouping = _WIDTH * math.log2(point.head_dim), _GROUPING * math.log2(point.grouping)
    return _Place(length, width, grouping, _MASK * point.causal, filling)


class _Measured(NamedTuple):
    place: _Place
    time: float
    work: float
    waited: bool


class _Backend:
    """The expected times of one backend."""

    def __init__(self, rows: Sequence[tuple[Point, float]], *, host: float | None, replayed: bool) -> None:
        every = [_Measured(_place(point), time, point.work, _waited(point, time, rows)) for point, time in rows]
        if host is None:
            late = sorted(one.time for one in every if one.waited)
            self.host = late[len(late) * 3 // 4] if len(late) >= _LATE_ROWS else 0.0
            self.quick = [one for one in every if not self.host or not (one.waited or one.time <= self.host)] or every
        else:
            self.host, self.quick = host, every
            every = [one._replace(time=max(one.time, host)) for one in every]
        if replayed:
            self.host, every = 0.0, self.quick
        self.every = every
        self._slowness = [(one, math.log(one.time / one.work)) for one in self.quick]
        alone = [self._alone(one.place)(one.place.filling, one.work) for one in every]
        # By which factor each took longer than is expected of it, as a logarithm.
        self.beside = [math.log(one.time / time) for one, time in zip(every, alone, strict=True)]

    def line(self, place: _Place) -> Callable[[float, float], float]:
        """Return what maps the place's count, which may vary, and the work to the milliseconds expected."""
        alone = self._alone(place)
        neighbours = [
            (square, one.place.filling, beside)
            for one, beside in zip(self.every, self.beside, strict=True)
            if (square := _square(one.place, place)) < _NEIGHBOUR**2
        ]

        def milliseconds(count: float, work: float) -> float:
            near = [max(1 - math.sqrt(square + (count - c) ** 2) / _NEIGHBOUR, 0.0) for square, c, _ in neighbours]
            beside = sum(weight * more for weight, (_, _, more) in zip(near, neighbours, strict=True))
            return alone(count, work) * math.exp(beside / max(sum(near), 1.0))

        return milliseconds

    def _alone(self, place: _Place) -> Callable[[float, float], float]:
        quick = [(_square(one.place, place), one.place.filling, slow) for one, slow in self._slowness]

        def milliseconds(count: float, work: float) -> float:
            weights, slowness = 0.0, 0.0
            for square, other, slow in quick:  # some hundred, for each of some thousand shapes
                weight = (square + (count - other) ** 2 + _ROUNDED) ** -1.5
                weights += weight
                slowness += weight * slow
            return max(self.host, work * math.exp(slowness / weights))

        return milliseconds

    def closeness(self, place: _Place) -> float:
        """Return how much of what was measured is near."""
        squares = (_square(one.place, place) + (one.place.filling - place.filling) ** 2 for one in self.every)
        return sum((square + _ROUNDED) ** -1.5 for square in squares)


def _waited(point: Point, time: float, rows: Sequence[tuple[Point, float]]) -> bool:
    return any(
        other.work >= point.work
        and other.length <= point.length
        and (other.head_dim, other.causal) == (point.head_dim, point.causal)
        and time / point.work > _LATE * others / other.work
        for other, others in rows
    )


def _square(one: _Place, other: _Place) -> float:
    # Of the distance but for the count.
    return (
        (one.length - other.length) ** 2
        + (one.width - other.width) ** 2
        + (one.grouping - other.grouping) ** 2
        + (one.mask - other.mask) ** 2
    )


class Expected:
    """The expected times of all backends in ``rows``, with gradients (``trains``) or without.

    A row that was measured with gradients only counts for both. ``host`` has the milliseconds that the host of each
    backend needs, where they were measured. None of them counts for what is ``replayed`` by CUDA graphs.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        trains: bool,
        host: Mapping[KernelName, float] | None = None,
        replayed: bool = False,
    ) -> None:
        times = [(point_of(row), row.training if trains or not row.forward else row.forward) for row in rows]
        self._backends: dict[KernelName, _Backend] = {}
        for name in BACKENDS:
            if found := [(point, some[name]) for point, some in times if name in some]:
                self._backends[name] = _Backend(found, host=host.get(name, 0.0) if host else None, replayed=replayed)

    @property
    def host(self) -> dict[KernelName, float]:
        """The milliseconds that each backend's host needs, or 0 where no row tells of them."""
        return {name: backend.host for name, backend in self._backends.items()}

    def milliseconds(self, point: Point, *, among: Sequence[KernelName] = BACKENDS) -> dict[KernelName, float]:
        """Return the time of each backend of ``among`` that was measured at shapes nearby."""
        return self.line(point, among=among)(point.pairs)

    def line(
        self, point: Point, *, among: Sequence[KernelName] = BACKENDS
    ) -> Callable[[float], dict[KernelName, float]]:
        """Return what maps numbers of pairs, in the place of the point's, to `milliseconds`."""
        place = _place(point)
        close: dict[KernelName, float] = {
            name: self._backends[name].closeness(place) for name in among if name in self._backends
        }
        # One that failed at the shapes nearby has no say from those far away.
        near: list[KernelName] = [name for name in close if close[name] > max(close.values()) / 2]
        lines: dict[KernelName, Callable[[float, float], float]] = {
            name: self._backends[name].line(place) for name in near
        }

        def milliseconds(pairs: float) -> dict[KernelName, float]:
            other = point._replace(pairs=pairs)
            count = _place(other).filling
            return {name: line(count, other.work) for name, line in lines.items()}

        return milliseconds
