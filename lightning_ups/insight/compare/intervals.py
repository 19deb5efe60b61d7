"""Intervals for the difference of two noisy series whose neighboring values are correlated, and of groups of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST = 8  # points for an interval
_FEW, _MANY, _LENGTH = 20, 40, 20  # blocks, and the least steps of one before there are more than few
_TRIMMED = 0.1  # of the blocks, at each end
_SHORT = 10  # steps of a block whose neighbors can be almost the same
_CORRELATION, _OF_SHORT = 0.6, 0.8  # the most between blocks; more would only be a trend
_DF = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 1e9)  # degrees of freedom, and Student's t for 99 %
_T = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.355, 3.169, 2.947, 2.845, 2.750, 2.576)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 99 % interval; NaN at both ends if there is none."""

    value: float
    low: float = nan
    high: float = nan

    def excludes(self, value: float) -> bool:
        """Return whether the interval is known and does not contain ``value``."""
        return self.low > value or self.high < value


def paired(base: Array, new: Array, *, typical: bool = True) -> Estimate:
    """Return the mean difference of two series, point by point.

    The points are grouped into blocks, because neighbors are correlated; what correlation remains between the blocks
    widens the interval.

    Args:
        base: The series to compare with.
        new: The other one, at the same steps.
        typical: Take medians within blocks and leave out extreme blocks, so that rare outliers do not count.
    """
    difference = new - base
    if len(difference) < FEWEST:
        return Estimate(float(np.median(difference)))
    length = max(1, len(difference) // min(_MANY, max(_FEW, len(difference) // _LENGTH)))
    count = len(difference) // length
    blocks = difference[len(difference) - count * length :].reshape(count, length)
    levels = np.median(blocks, axis=1) if typical else blocks.mean(axis=1)
    most = _CORRELATION if length >= _SHORT else _OF_SHORT
    return _mean(levels, trimmed=int(_TRIMMED * count) if typical else 0, most=most)


def groups(base: Sequence[float], new: Sequence[float]) -> Estimate:
    """Return the difference of the means of two groups of independent runs, one value per run."""
    value, df = float(np.mean(new) - np.mean(base)), len(base) + len(new) - 2
    if df < 1:
        return Estimate(value)
    squares = sum(float(np.sum((np.asarray(group) - np.mean(group)) ** 2)) for group in (base, new))
    return _around(value, sqrt(squares / df * (1 / len(base) + 1 / len(new))), df)


def _mean(levels: Array, *, trimmed: int, most: float) -> Estimate:
    count = len(levels)
    ordered = np.sort(levels)
    kept = ordered[trimmed : count - trimmed]
    clipped = np.clip(levels, kept[0], kept[-1])  # the spread of a trimmed mean is that of winsorized values
    spread = float(clipped.std(ddof=1)) * count / len(kept)
    around = clipped - clipped.mean()
    squares = float(around @ around)
    found = float(around[1:] @ around[:-1]) / squares if squares else 0.0
    # Found correlations are too small by about (1 + 4 x correlation) / count.
    correlation = min(most, max(0.0, (count * found + 1) / (count - 4)))
    inflation = (1 + correlation) / (1 - correlation)
    return _around(float(kept.mean()), spread * sqrt(inflation / count), max(5.0, len(kept) / inflation - 1))


def _around(value: float, error: float, df: float) -> Estimate:
    half = error * float(np.interp(-1 / df, [-1 / each for each in _DF], _T))
    return Estimate(value, value - half, value + half)
