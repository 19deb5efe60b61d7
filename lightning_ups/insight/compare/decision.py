"""Decide whether a run may replace another: at most so much slower, and its loss within a band."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan, sqrt

import numpy as np

from lightning_ups.insight.compare.differences import MEAN_STEP, STEP, Effect, Side, effects

PASS, FAIL, CANNOT_TELL = "PASS", "FAIL", "CANNOT TELL"
_LOSSES = ("val_loss", "valid_loss", "val/loss", "train_loss", "train/loss", "loss")


@dataclass(frozen=True, slots=True)
class Band:
    """How much greater a loss may be: a number, or a share of base's loss."""

    size: float
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, PASS, FAIL or CANNOT TELL, and its reason as a part of a sentence."""

    verdict: str
    reason: str


def gate(
    base: Side, new: Side, *, slower: float | None, loss: Band | None, metric: str | None, warmup: int | None = None
) -> Decision:
    """Return whether ``new`` passes.

    Args:
        base: The side to compare with.
        new: The side that may replace it.
        slower: By what share its steps may be slower. None: 0.02, if both sides have step times.
        loss: By how much its loss may be greater. None: by the noise of the loss, if both sides have a loss.
        metric: The loss. None: the validation loss, else the training loss; without ``loss``, the first with enough
            values to show its noise.
        warmup: Steps at the beginning that do not count for speed. None: the first tenth.

    Raises:
        ValueError: If what is asked for is not in the runs, or nothing is.
    """
    found = {effect.name: effect for effect in effects(base, new, warmup=warmup)}
    names = [name for name in found if name not in (STEP, MEAN_STEP)]
    if metric is None:
        losses = [name for name in (*_LOSSES, *names) if name in found and "loss" in name.lower()]
        is_tested = [isfinite(found[name].difference.low) or loss is not None for name in losses]
        metric = next(
            (name for name, tested in zip(losses, is_tested, strict=True) if tested), next(iter(losses), None)
        )
    if metric is not None and metric not in found:
        raise ValueError(f"--metric {metric} is not in all runs. They have {', '.join(names[:12]) or 'no metric'}.")
    if slower is not None and STEP not in found:
        raise ValueError(
            f"--slower needs step times, which {_without_times(base, new)} does not have. Train it with"
            " TokenThroughput(), or log a column such as step_time_s."
        )
    if loss is not None and metric is None:
        raise ValueError(f"--loss finds no loss in all runs. Name it by --metric: {', '.join(names[:12]) or 'none'}.")
    if STEP not in found and metric is None:
        raise ValueError(f"{base.name} and {new.name} share neither step times nor a loss. Log one of them in both.")
    decisions = []
    if STEP in found:
        _check_batch(base, new)
        decisions.append(_speed(found[STEP], found.get(MEAN_STEP), limit=0.02 if slower is None else slower))
    if metric is not None:
        decisions.append(_loss(found[metric], loss, base, new))
    return _joined(decisions)


def percent(share: float, *, sign: bool = False) -> str:
    """Return ``share`` in percent."""
    return f"{100 * share:{'+' if sign else ''}.{1 if abs(share) < 0.1 else 0}f} %"


def _joined(decisions: Sequence[Decision]) -> Decision:
    verdict = next((each for each in (FAIL, CANNOT_TELL) if any(one.verdict == each for one in decisions)), PASS)
    return Decision(verdict, ", and ".join(one.reason for one in decisions if verdict in (PASS, one.verdict)))


def _speed(typical: Effect, mean: Effect | None, *, limit: float) -> Decision:
    allowed = f"at most {percent(limit)} is allowed"
    for effect, what in ((typical, "a typical step"), (mean, "the mean step")):
        if effect is not None and effect.difference.low > limit:
            return Decision(FAIL, f"{what} is {_slower(effect)}; {allowed}")
    if typical.difference.high <= limit:
        return Decision(PASS, f"a typical step is {_slower(typical)}; {allowed}")
    return Decision(CANNOT_TELL, f"a typical step is {_slower(typical)}; {allowed}: run more steps, or several runs")


def _slower(effect: Effect) -> str:
    value, low, high = effect.difference.value, effect.difference.low, effect.difference.high
    if isnan(value):
        return "not known, since no step is in both runs"
    said = f"{percent(abs(value))} {'slower' if value > 0 else 'faster'}"
    if not isfinite(low):
        return f"{said} by {effect.points} values, too few for an interval"
    return f"{said} (99 % interval {percent(low, sign=True)} to {percent(high, sign=True)})"


def _loss(effect: Effect, band: Band | None, base: Side, new: Side) -> Decision:
    if effect.verdict == "not finite":
        return Decision(FAIL, f"{effect.name} is not finite")
    if not effect.points:
        return Decision(CANNOT_TELL, f"{effect.name} was logged at no step in both")
    if band is not None:
        size, what = band.size * (abs(effect.base) if band.relative else 1), "the band"
    elif effect.difference.value <= 0:
        return Decision(PASS, f"{effect.name} is {effect.new:.4g} against {effect.base:.4g}")
    elif len(base.runs) + len(new.runs) > 2:
        half = effect.difference.high - effect.difference.value
        size, what = half, "the band of its seeds"
    elif isfinite(effect.difference.low):
        ends = base.runs[0].series[effect.name].values[-effect.points :]
        size, what = float(np.std(np.diff(ends))) / sqrt(2), "the noise of its points"  # without their trend
    else:
        return Decision(CANNOT_TELL, f"{effect.name} has too few values to show its noise: give a band, as --loss 1%")
    is_within = effect.difference.value <= size
    where = f"{'within' if is_within else 'beyond'} {what}, {size:.3g}"
    return Decision(
        PASS if is_within else FAIL, f"{effect.name} is {effect.new:.4g} against {effect.base:.4g}, {where}"
    )


def _check_batch(base: Side, new: Side) -> None:
    sizes = {str(run.manifest["batch"].get("size")) for run in (*base.runs, *new.runs) if run.manifest.get("batch")}
    if len(sizes) > 1:
        raise ValueError(
            f"gate compares steps of one size, but batches have {' and '.join(sorted(sizes))} rows. Train both sides"
            " with the same batch_size, or use compare, which shows rates."
        )


def _without_times(base: Side, new: Side) -> str:
    return next((run.name for run in (*base.runs, *new.runs) if not run.times), "one of the runs")
