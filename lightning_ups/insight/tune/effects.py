"""The effect of one configuration over another, from rounds in which each was measured once, with its interval."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, sqrt
from typing import Literal

from lightning_ups.insight.tune.result import Result

Verdict = Literal["worth it", "neutral", "harmful", "one round cannot tell"]

_LOSS_DIFFERS = 0.05  # of the mean loss of the first steps
LEAST = 0.01  # an effect below it is neutral, even if it is certain
# 97.5 % quantiles of Student's t distribution, by degrees of freedom from 1.
_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_QUANTILES += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
_NORMAL = 1.96


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A relative gain, with a confidence interval of 95 %, which is infinite after one round."""

    value: float
    low: float = -inf
    high: float = inf

    @property
    def is_known(self) -> bool:
        """Whether there were enough rounds for an interval."""
        return isfinite(self.low) and isfinite(self.high)

    @property
    def verdict(self) -> Verdict:
        """Whether it is a gain, a loss, or neither."""
        if not self.is_known:
            return "one round cannot tell"
        if self.low > 0 and self.value >= LEAST:
            return "worth it"
        return "harmful" if self.high < 0 and self.value <= -LEAST else "neutral"

    def as_dict(self) -> dict[str, float | None]:
        """Return the gain as plain values; the interval is None if it is not known."""
        low, high = (self.low, self.high) if self.is_known else (None, None)
        return {"value": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        interval = f"{self.low:+.1%}, {self.high:+.1%}" if self.is_known else "not known"
        return f"{self.value:+.1%} [{interval}]"


class Rounds:
    """Compares configurations that were measured in the same rounds, each once in a round.

    A round in which everything was slower moves no difference, since the model has an effect for each round. Rounds
    that not all configurations have are left out.

    Args:
        results: The successful results of each configuration, in the order of rounds.
    """

    def __init__(self, results: Mapping[str, Sequence[Result]]) -> None:
        self._count = min(map(len, results.values()), default=0)
        used = {name: found[: self._count] for name, found in results.items()}
        rates = {name: [log(each.samples_per_s) for each in found] for name, found in used.items()}
        self._means = {name: statistics.fmean(found) for name, found in rates.items() if found}
        errors = [each.error**2 for found in used.values() for each in found]
        within = statistics.fmean(errors) if errors else 0.0  # the spread of steps cannot be less than this
        free = (len(rates) - 1) * (self._count - 1)
        self._variance = max(_residual(rates) / free, within) if free > 0 else inf
        self._quantile = _QUANTILES[free - 1] if 0 < free <= len(_QUANTILES) else _NORMAL

    def gain(self, of: str, over: str) -> Gain:
        """Return the gain in throughput of one configuration over another."""
        value = self._means[of] - self._means[over]
        half = self._quantile * sqrt(2 * self._variance / self._count)
        if not isfinite(half):
            return Gain(value=exp(value) - 1)
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
    return _difference(result.losses, reference.losses)


def loss_fault(result: Result, reference: Result) -> str | None:
    """Return why the losses of the first steps are not those of ``reference``.

    None: they are, or ``reference`` has no losses to compare with. The means may differ by 5 %, or by what the noise of
    the losses explains: dropout draws other numbers in compiled code.
    """
    known = _finite(reference.losses)
    found = result.losses[: len(known)]
    if not known:
        return None
    if not found:
        return "no loss was recorded"
    if (wrong := len(_finite(found))) < len(found):
        return f"the loss of step {wrong + 1} is {found[wrong]}"
    if len(found) > 2 and len({*found}) == 1 and len({*known[: len(found)]}) > 1:
        return f"the loss is {found[0]:.4g} in each step"
    difference = _difference(found, known) or 0.0
    error = _noise(known) * sqrt(2 / len(found)) / (_size(known[: len(found)]) or 1.0)
    if abs(difference) <= max(_LOSS_DIFFERS, 2 * error):
        return None
    return f"the mean loss of {len(found)} steps differs by {difference:+.1%}"


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    count = min(len(losses), len(reference))
    if not count:
        return None
    difference = statistics.fmean(losses[:count]) - statistics.fmean(reference[:count])
    return difference / (_size(reference[:count]) or 1.0)


def _finite(losses: Sequence[float]) -> Sequence[float]:
    """Return the losses before the first that is NaN or infinite."""
    return losses[: next((index for index, loss in enumerate(losses) if not isfinite(loss)), len(losses))]


def _size(losses: Sequence[float]) -> float:
    return statistics.fmean(map(abs, losses))  # losses of both signs may have a mean of nearly zero


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses around a curve that is straight over three steps."""
    bends = [(a - 2 * b + c) ** 2 for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    return sqrt(statistics.fmean(bends) / 6) if bends else 0.0
