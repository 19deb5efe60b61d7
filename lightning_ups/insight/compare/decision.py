"""Decide whether a run may replace another: at most so much slower, and its loss at most so much worse."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, isnan

import numpy as np

from lightning_ups.insight.compare.differences import FLOOR, MEAN_STEP, STEP, Effect, Side, effects, kind_of_times
from lightning_ups.insight.compare.direction import is_higher_better
from lightning_ups.insight.compare.intervals import Estimate
from lightning_ups.insight.compare.reading import Series

PASS, FAIL, CANNOT_TELL = "PASS", "FAIL", "CANNOT TELL"
_LOSSES = ("val_loss", "valid_loss", "val/loss", "train_loss", "train/loss", "loss")


@dataclass(frozen=True, slots=True)
class Band:
    """How much worse a metric may be: a number, or a share of base's value."""

    size: float
    relative: bool = False


_ALLOWED = Band(0.02, relative=True)  # of steps and of a loss, if nothing is asked for
_WIDE = 10  # times base's value, more and less: an interval without use
_APART = 0.05  # the difference of two values may be, from that of their matched steps
_MOST = 30  # times as many steps or runs: what is worth a try


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, PASS, FAIL or CANNOT TELL, and its reason as a part of a sentence."""

    verdict: str
    reason: str


def gate(
    base: Side,
    new: Side,
    *,
    slower: float | None,
    loss: Band | None,
    metric: str | None,
    higher: bool | None = None,
    warmup: int | None = None,
) -> Decision:
    """Return whether ``new`` passes.

    The interval of each difference decides: within the limit, beyond it, or neither.

    Args:
        base: The side to compare with.
        new: The side that may replace it.
        slower: By what share its steps may be slower. None: 0.02, if both sides have step times.
        loss: By how much its loss may be worse. None: 2 %, if both sides have a loss.
        metric: The loss. None: the validation loss, else the training loss; without ``loss``, the first with enough
            values to show its noise.
        higher: Whether a higher value of the metric is better. None: known by its name, or by what monitors it.
        warmup: Steps at the beginning that do not count for speed. None: the first tenth.

    Raises:
        ValueError: If what is asked for is not in the runs, or nothing is.
    """
    found = {effect.name: effect for effect in effects(base, new, warmup=warmup)}
    names = [name for name in found if name not in (STEP, MEAN_STEP)]
    others: list[str] = []
    if metric is None:
        losses = [name for name in (*_LOSSES, *names) if name in found and "loss" in name.lower()]
        is_tested = [isfinite(found[name].difference.low) or loss is not None for name in losses]
        metric = next(
            (name for name, tested in zip(losses, is_tested, strict=True) if tested), next(iter(losses), None)
        )
        others = [name for name in losses if name != metric]
    if metric is not None and metric not in names:
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
        limit = _ALLOWED.size if slower is None else slower
        decisions.append(_speed(found[STEP], found.get(MEAN_STEP), limit=limit, runs=_most_runs(base, new)))
    if metric is not None:
        if higher is None:
            higher = is_higher_better(metric, [*base.runs, *new.runs])
        decisions.append(_loss(found[metric], loss, higher=higher, runs=_most_runs(base, new)))
    return _joined([*_endings(base, new, metric), *decisions, *_others(found[name] for name in others)])


def percent(share: float, *, sign: bool = False) -> str:
    """Return ``share`` in percent."""
    return f"{100 * share:{'+' if sign else ''}.{1 if abs(share) < 0.1 else 0}f} %"


def interval(found: Estimate, *, relative: bool) -> str:
    """Return both ends of the 99 % interval of a difference, or that it is too wide to be of use."""
    if not relative:
        return f"{found.low:+.3g} to {found.high:+.3g}"
    # The interval of a mean can reach below -100 %, which nothing can fall by.
    if (found.low < -1 and found.high > 0) or (found.low < -_WIDE / (1 + _WIDE) and found.high > _WIDE):
        return "too wide to tell"
    return f"{percent(max(-1, found.low), sign=True)} to {percent(found.high, sign=True)}"


def of_matched_steps(effect: Effect) -> str:
    """Return that the values of both sides differ otherwise than their matched steps do; empty if they do not."""
    found = effect.difference.value
    shown = effect.new / effect.base - 1 if effect.relative and effect.base else found
    apart = abs(shown - found)
    if not (apart > _APART or (shown * found < 0 and apart > 2 * FLOOR)):
        return ""
    return f"at matched steps, while the runs' averages differ by {percent(shown, sign=True)}"


def _joined(decisions: Sequence[Decision]) -> Decision:
    verdict = next((each for each in (FAIL, CANNOT_TELL) if any(one.verdict == each for one in decisions)), PASS)
    reasons = dict.fromkeys(one.reason for one in decisions if verdict in (PASS, one.verdict))
    return Decision(verdict, ", and ".join(reasons))


def _endings(base: Side, new: Side, metric: str | None) -> Iterator[Decision]:
    """Yield a decision for each new run that failed, or ended before the runs of base."""
    for run in new.runs:
        name = new.name if len(new.runs) == 1 else run.name
        of_run = run.manifest.get("run", {})
        if of_run.get("status") == "failed":
            yield Decision(FAIL, f"{name} failed: {of_run.get('error') or 'its manifest has no error'}")
            continue
        if of_run.get("status") == "running":
            yield Decision(CANNOT_TELL, f"{name} has not ended, or was killed: its manifest says running")
            continue
        of_times = kind_of_times([base, new])
        for pairs in (
            [(each.times[of_times], run.times[of_times]) for each in base.runs if of_times],
            [(each.series[metric], run.series[metric]) for each in base.runs if metric],
        ):
            missing = [(first.steps[-1], own.steps[-1]) for first, own in pairs if _is_shorter(own, first)]
            if missing and len(missing) == len(pairs):
                last, ended = min(missing)
                yield Decision(
                    CANNOT_TELL, f"{name} ended at step {ended:.0f}, and base at {last:.0f}: train both to one step"
                )
                break


def _is_shorter(series: Series, other: Series) -> bool:
    """Return whether ``series`` lacks a value at its end, and 1 % of the steps."""
    gap = float(np.max(np.diff(series.steps))) if len(series.steps) > 1 else series.steps[0] + 1
    return bool(other.steps[-1] - series.steps[-1] >= max(gap, 0.01 * other.steps[-1]))


def _most_runs(base: Side, new: Side) -> int:
    return max(len(base.runs), len(new.runs))


def _speed(typical: Effect, mean: Effect | None, *, limit: float, runs: int) -> Decision:
    allowed = f"at most {percent(limit)} is allowed"
    for effect, what in ((typical, "a typical step"), (mean, "the mean step")):
        if effect is not None and effect.difference.low > limit:
            return Decision(FAIL, f"{what} is {_slower(effect)}; {allowed}")
    if typical.difference.high <= limit:
        return Decision(PASS, f"a typical step is {_slower(typical)}; {allowed}")
    cure = _cure(typical.difference, limit, runs, option="--slower")
    return Decision(CANNOT_TELL, f"a typical step is {_slower(typical)}; {allowed}: {cure}")


def _cure(found: Estimate, limit: float, runs: int, *, option: str) -> str:
    """Return what would decide a difference whose interval contains the limit, or that has no interval."""
    is_speed = option == "--slower"
    if not isfinite(found.low):
        return "run more steps, or several runs"
    margin = abs(limit - found.value)
    times = ceil(((found.high - found.low) / 2 / margin) ** 2) if margin else _MOST + 1
    if times > _MOST and runs == 2:
        return "give at least 3 runs per side"
    if times > _MOST:
        return f"too noisy for this limit; {'use an idle machine, or ' if is_speed else ''}allow more by {option}"
    if runs > 1:
        return f"about {max(runs + 1, times * runs)} runs per side would tell"
    return f"about {max(2, times)} times as many {'steps' if is_speed else 'logged values'} would tell"


def _slower(effect: Effect) -> str:
    value = effect.difference.value
    if isnan(value):
        return f"not known ({effect.note})"
    said = f"{percent(abs(value))} {'slower' if value > 0 else 'faster'} {of_matched_steps(effect)}".rstrip()
    if not isfinite(effect.difference.low):
        return f"{said} by {_few(effect)}"
    return f"{said} (99 % interval {interval(effect.difference, relative=True)})"


def _few(effect: Effect) -> str:
    return f"{effect.points} {'value' if effect.points == 1 else 'values'}, too few for an interval"


def _loss(effect: Effect, band: Band | None, *, higher: bool, runs: int) -> Decision:
    if broken := effect.not_finite.get("new") or effect.not_finite.get("base"):
        what = f"{effect.name} of {broken[0]} is not finite at step {broken[1]:.0f}"
        is_new = "new" in effect.not_finite
        return Decision(FAIL, what) if is_new else Decision(CANNOT_TELL, f"{what}: choose another base")
    if not effect.points:
        return Decision(CANNOT_TELL, f"{effect.name} has no step in common: log it at the same steps")
    limit, allowed = _limit(effect, band or _ALLOWED)
    said = f"{effect.name} is {effect.new:.4g} against {effect.base:.4g}"
    low, high = effect.difference.low, effect.difference.high
    found = Estimate(-effect.difference.value, -high, -low) if higher else effect.difference
    if isfinite(low):
        said += f" (99 % interval {interval(effect.difference, relative=effect.relative)}); {allowed}"
        if found.low <= limit < found.high:
            cure = _falling(effect) or _cure(found, limit, runs, option="--loss")
            return Decision(CANNOT_TELL, f"{said}: {cure}")
        return Decision(PASS if found.high <= limit else FAIL, said)
    if band is None and found.value > 0:
        return Decision(CANNOT_TELL, f"{said} by {_few(effect)}: log it more often, or give a band such as --loss 1%")
    return Decision(PASS if found.value <= limit else FAIL, f"{said} by {_few(effect)}; {allowed}")


def _falling(effect: Effect) -> str:
    """Return that the metric of both sides still falls, with its figures; empty if it does not."""
    if len(effect.falling) < 2:
        return ""
    base, new = (f"from {first:.3g} to {last:.3g}" for first, last in (effect.falling[key] for key in ("base", "new")))
    return f"both still fall over these {effect.points} values, base {base} and new {new}, so train longer"


def _others(losses: Iterable[Effect]) -> Iterator[Decision]:
    """Yield what forbids to pass in losses that do not decide, since they have too few values or another does."""
    for effect in losses:
        if "new" in effect.not_finite:
            yield _loss(effect, None, higher=False, runs=1)
        elif effect.points and not isfinite(effect.difference.low):
            limit, allowed = _limit(effect, _ALLOWED)
            if effect.difference.value > limit:
                said = f"{effect.name} is {effect.new:.4g} against {effect.base:.4g} by {_few(effect)}; {allowed}"
                yield Decision(CANNOT_TELL, f"{said}: log it more often, or decide by --metric {effect.name} --loss 2%")


def _limit(effect: Effect, band: Band) -> tuple[float, str]:
    """Return how much worse the effect may be, in its own unit, and that as a part of a sentence."""
    level = abs(effect.base)
    size = band.size * level if band.relative else band.size
    share = f" ({percent(band.size)})" if band.relative else ""
    return size / level if effect.relative else size, f"at most {size:.3g}{share} worse is allowed"


def _check_batch(base: Side, new: Side) -> None:
    sizes = {str(run.manifest["batch"].get("size")) for run in (*base.runs, *new.runs) if run.manifest.get("batch")}
    if len(sizes) > 1:
        raise ValueError(
            f"gate compares steps of one size, but batches have {' and '.join(sorted(sizes))} rows. Train both sides"
            " with the same batch_size, or use compare, which shows rates."
        )


def _without_times(base: Side, new: Side) -> str:
    return next((run.name for run in (*base.runs, *new.runs) if not run.times), "one of the runs")
