"""The steps of a trial that count: where the warm-up ends, and how exact the rate of the rest is."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

_FEWEST = 8  # steps after the warm-up, for a rate that has settled


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The steps after the warm-up.

    Args:
        warmup: The number of steps before.
        seconds: The times of the steps.
        error: The standard error of their mean, as a share of it.
        has_settled: Whether the warm-up is over, and there are enough steps for a rate.
    """

    warmup: int
    seconds: Sequence[float]
    error: float
    has_settled: bool

    @property
    def mean(self) -> float:
        """The mean time of a step: rare slow steps count."""
        return statistics.fmean(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of the times; the middle one is the median."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, statistics.median(self.seconds), high


def steady(seconds: Sequence[float]) -> Steady:
    """Return the steps after the warm-up, which is found by the rule of the marginal standard error (MSER).

    Of all numbers of first steps, up to half, it leaves out the one for which the mean of the others is known best.

    Raises:
        ValueError: If there is no step.
    """
    if not seconds:
        raise ValueError("seconds is empty. Time at least one step.")
    errors = [_squared_error(seconds[cut:]) for cut in range(len(seconds) // 2 + 1)]
    warmup = errors.index(min(errors))
    rest = seconds[warmup:]
    known = len(rest) > 1
    return Steady(
        warmup=warmup,
        seconds=rest,
        error=sqrt(statistics.variance(rest) / len(rest)) / statistics.fmean(rest) if known else inf,
        # A cut at the upper limit means that the times still fall.
        has_settled=len(rest) >= _FEWEST and warmup < len(errors) - 1,
    )


def _squared_error(seconds: Sequence[float]) -> float:
    return statistics.pvariance(seconds) / len(seconds)
