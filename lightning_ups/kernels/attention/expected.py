"""Estimates the time of each backend for a shape from measured shapes.

A backend's time is its work divided by its speed, but at least the time that its host needs. The speed is a weighted
geometric mean over nearby measured shapes: it depends on the head dimension, the length, and on how many heads and rows
fill the device, and hardly on how heads share keys. The ratio of a shape's measured time to its estimate also corrects
its close neighbors.

A table with host times has pure device times. Without host times, they are inferred from rows whose time is independent
of the work: the same head dimension ran much faster with more work of no greater length. The upper quartile of such
times is the host's, because in training the host has other work, too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lightning_ups.kernels.attention.support import BACKENDS, KernelName
from lightning_ups.kernels.attention.table import Row

__all__ = ["Expected", "Point", "point_of"]

# Distances are in octaves of length. A difference of one in another property counts as this many octaves:
_WIDTH, _COUNT, _GROUPING, _MASK = 4.0, 0.5, 0.25, 1.5
_LATE = 1.25  # a row with more time per work than one with more work, by this factor, waited for its host
_LATE_ROWS = 3  # this many must have waited, to distinguish host time from a slow shape
_NEAR = 0.25  # the distance of close neighbors
_ROUNDED = 1e-3  # keeps the weight of a measured shape itself finite


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


def point_of(row: Row) -> Point:
    """Return the point of a measured shape."""
    pairs = row.batch * row.heads * row.seq**2
    return Point(row.head_dim, row.heads / row.kv_heads, row.causal, row.seq, pairs)


class _Place(NamedTuple):
    # In octaves of length: the distance of two shapes is the norm of their difference.
    length: float
    width: float
    grouping: float
    mask: float
    filling: float  # of the device, by rows x heads


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
        # The logarithm of measured time over estimated time.
        self.excess = [math.log(one.time / time) for one, time in zip(every, alone, strict=True)]

    def line(self, place: _Place) -> Callable[[float, float], float]:
        """Return a function from the filling at ``place``, which may vary, and the work to expected milliseconds."""
        alone = self._alone(place)
        neighbors = [
            (square, one.place.filling, excess)
            for one, excess in zip(self.every, self.excess, strict=True)
            if (square := _square(one.place, place)) < _NEAR**2
        ]

        def milliseconds(count: float, work: float) -> float:
            near = [max(1 - math.sqrt(square + (count - c) ** 2) / _NEAR, 0.0) for square, c, _ in neighbors]
            excess = sum(weight * more for weight, (_, _, more) in zip(near, neighbors, strict=True))
            return alone(count, work) * math.exp(excess / max(sum(near), 1.0))

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
        """Return a measure of how close measured shapes are."""
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
    # Distance without the filling.
    return (
        (one.length - other.length) ** 2
        + (one.width - other.width) ** 2
        + (one.grouping - other.grouping) ** 2
        + (one.mask - other.mask) ** 2
    )


class Expected:
    """The expected times of all backends in ``rows``, with gradients (``trains``) or without.

    A row that was only measured with gradients counts for both. ``host`` has the milliseconds that the host of each
    backend needs, if they were measured. They do not count for calls ``replayed`` by CUDA graphs.
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
        """The milliseconds that each backend's host needs, or 0 if unknown."""
        return {name: backend.host for name, backend in self._backends.items()}

    def milliseconds(self, point: Point, *, among: Sequence[KernelName] = BACKENDS) -> dict[KernelName, float]:
        """Return the time of each backend of ``among`` that was measured at nearby shapes."""
        return self.line(point, among=among)(point.pairs)

    def line(
        self, point: Point, *, among: Sequence[KernelName] = BACKENDS
    ) -> Callable[[float], dict[KernelName, float]]:
        """Return a function that maps numbers of pairs, at the position of the point, to `milliseconds`."""
        place = _place(point)
        close: dict[KernelName, float] = {
            name: self._backends[name].closeness(place) for name in among if name in self._backends
        }
        # A backend that failed at the nearby shapes is not estimated from distant ones.
        near: list[KernelName] = [name for name in close if close[name] > max(close.values()) / 2]
        lines: dict[KernelName, Callable[[float, float], float]] = {
            name: self._backends[name].line(place) for name in near
        }

        def milliseconds(pairs: float) -> dict[KernelName, float]:
            other = point._replace(pairs=pairs)
            count = _place(other).filling
            return {name: line(count, other.work) for name, line in lines.items()}

        return milliseconds
