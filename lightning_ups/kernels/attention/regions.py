"""Where each backend is the fastest: ranges of length, each with ranges of the number of query-key pairs.

A function compiled for dynamic lengths has guards on the ranges for which its choices were made, and is recompiled
outside of them. The ranges are therefore as wide as possible: lengths (in quarters of an octave) form one range while
one choice is expected to be within 3 % of the fastest for all of them. If all ranges agree for a number of pairs, the
guard does not depend on the length. Boundaries between pairs are exact, because a backend that waits for its host takes
as long for fewer pairs.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_ups.kernels.attention.support import KernelName

__all__ = ["Range", "Regions", "find_regions"]

Times = dict[KernelName, float]
Line = Callable[[float], Times]

_SHORTEST, _LONGEST, _FINE = 5, 18, 4  # octaves of length, and cells per octave
_MOST_ROWS = 20  # octaves of rows x heads
_NEAR = 0.03
_NEVER = 1 << 62


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
        self.length, self.times = length, times
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
        while end < len(cells) and _shared(cells, choices, start, end + 1):
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


def _shared(cells: Sequence[_Cell], choices: Sequence[Range], start: int, end: int) -> bool:
    middle = choices[(start + end - 1) // 2]
    return all(cell.takes(middle) for cell in cells[start:end])


def _near(times: Times, backend: KernelName) -> bool:
    return backend in times and times[backend] <= (1 + _NEAR) * min(times.values())


def _fastest(times: Times) -> KernelName:
    return min(times, key=times.__getitem__)
