"""The effect of one configuration over another, from rounds in which each was measured once, with its interval."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Literal

from lightning_ups.insight.tune.result import Result

Verdict = Literal["worth it", "neutral", "harmful"]

LEAST = 0.01  # an effect below it is neutral, even if it is certain
# 97.5 % quantiles of Student's t distribution, by degrees of freedom from 1.
_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_QUANTILES += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
_NORMAL = 1.96


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A relative gain, with a confidence interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Whether it is a gain, a loss, or neither."""
        if self.low > 0 and self.value >= LEAST:
            return "worth it"
        return "harmful" if self.high < 0 and self.value <= -LEAST else "neutral"

    def __str__(self) -> str:
        return f"{self.value:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


class Rounds:
    """Compares configurations that were measured in the same rounds, each once in a round.

    A round in which everything was slower moves no difference, since the model has an effect for each round.

    Args:
        results: The successful results of each configuration, in the order of rounds.
    """

    def __init__(self, results: Mapping[str, Sequence[Result]]) -> None:
        full = max(map(len, results.values()), default=0)
        rates = {name: [log(each.samples_per_s) for each in found] for name, found in results.items()}
        self._means = {name: statistics.fmean(found) for name, found in rates.items() if found}
        self._counts = {name: len(found) for name, found in rates.items()}
        complete = {name: found for name, found in rates.items() if len(found) == full}
        errors = [each.error**2 for found in results.values() for each in found]
        within = statistics.fmean(errors) if errors else 0.0  # the spread of steps cannot be less than this
        free = (len(complete) - 1) * (full - 1)
        variance = _residual(complete) / free if free > 0 else 0.0
        self._variance = max(variance, within)
        is_known = free > 0 and variance >= within
        self._quantile = _NORMAL if not is_known or free > len(_QUANTILES) else _QUANTILES[free - 1]

    def gain(self, of: str, over: str) -> Gain:
        """Return the gain in throughput of one configuration over another."""
        value = self._means[of] - self._means[over]
        half = self._quantile * sqrt(self._variance * (1 / self._counts[of] + 1 / self._counts[over]))
        return Gain(value=exp(value) - 1, low=exp(value - half) - 1, high=exp(value + half) - 1)


def _residual(rates: Mapping[str, Sequence[float]]) -> float:
    """Return the sum of squares that neither configurations nor rounds explain."""
    rows = [*rates.values()]
    columns = [*zip(*rows, strict=True)]
    overall = statistics.fmean(value for row in rows for value in row)
    return sum(
        (value - statistics.fmean(row) - statistics.fmean(column) + overall) ** 2
        for row in rows
        for value, column in zip(row, columns, strict=True)
    )


def loss_difference(result: Result, reference: Result) -> float | None:
    """Return the relative difference of the mean loss of the first steps, or None if there are no losses."""
    count = min(len(result.losses), len(reference.losses))
    if not count:
        return None
    mean, other = (statistics.fmean(each.losses[:count]) for each in (result, reference))
    return (mean - other) / abs(other) if other else mean - other
