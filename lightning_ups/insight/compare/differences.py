"""What differed between two sides of one or more runs, and what effect that had."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import exp, inf, isfinite, nan
from typing import Any

import numpy as np

from lightning_ups.insight.compare.intervals import FEWEST, Array, Estimate, groups, paired
from lightning_ups.insight.compare.reading import RunLog, Series, best_times

FLOOR = 0.01  # two equal runs on one machine differ by up to about that in speed, which one run per side cannot show
STEP, MEAN_STEP = "step time, typical", "step time, mean"
EACH_STEP = ("step_times.csv", "a column")
_SPEED = re.compile(r"(throughput|memory|gpu)/.+|.*(_per_s|_per_sec|_per_second|it_per_s)")
_REPEATED = re.compile(r"throughput/(step_ms|step_p95_ms|.+_per_s_per_device)")
_LAST = ("versions", "host", "device", "code", "environment")  # of the settings, for people
_FALL, _TREND = 0.1, 0.7  # of a loss that still falls: its share, and the least correlation with the step
_UNTIMED = 0.05  # of the steps; a clock that shows more steps of 0 s is too coarse
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Side:
    """One or more runs of one configuration."""

    name: str
    runs: Sequence[RunLog]


@dataclass(frozen=True, slots=True)
class Effect:
    """The difference of one value between two sides.

    Args:
        name: What was measured.
        base: Its value on the side that is compared with.
        new: Its value on the other side.
        difference: New minus base, as a share of base if ``relative``, with its interval.
        points: The steps that both have and that count.
        verdict: ``significant``, ``noise``, ``identical``, ``not finite``, ``not tested``; of metrics with one run
            per side ``beyond batch noise``, since another seed may differ more.
        falling: The means of the first and of the last half of these steps, by side (``base``, ``new``), if a metric
            still falls there.
        not_finite: The runs whose value is not finite, now or later, by side (``base``, ``new``): name and step.
    """

    name: str
    base: float
    new: float
    difference: Estimate
    points: int
    verdict: str
    note: str = ""
    relative: bool = True
    falling: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    not_finite: Mapping[str, tuple[str, float]] = field(default_factory=dict)


def effects(base: Side, new: Side, *, warmup: int | None = None) -> list[Effect]:
    """Return the effects on step time, on speed and memory, and on each metric that all runs have.

    Args:
        base: The side to compare with.
        new: The other side.
        warmup: Steps at the beginning that do not count for speed. None: the first tenth.
    """
    runs = [*base.runs, *new.runs]
    found = [*_step_times(base, new, warmup)]
    names = [name for name in runs[0].series if all(name in run.series for run in runs)]
    names = [name for name in names if not (found and _REPEATED.fullmatch(name))]
    speed = [name for name in names if _SPEED.fullmatch(name)]
    metrics = [name for name in names if name not in speed]
    found += [_speed(name, *_common(base, new, lambda run, name=name: run.series[name], warmup)) for name in speed]
    return found + [_metric(name, base, new) for name in metrics]


def different_settings(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Return the settings that differ between the sides and not within one, with the value of each side."""
    if not all(run.settings for side in sides for run in side.runs):
        return {}
    if len({bool(run.manifest) for side in sides for run in side.runs}) > 1:
        return {}  # names of different files
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for side in sides for run in side.runs for name in run.settings):
        values = [[run.settings.get(name, ABSENT) for run in side.runs] for side in sides]
        firsts = [each[0] for each in values]
        if any(first != firsts[0] for first in firsts) and all(each.count(each[0]) == len(each) for each in values):
            found[name] = firsts
    return dict(sorted(found.items(), key=lambda item: item[0].partition("/")[0] in _LAST))


def kind_of_times(sides: Sequence[Side]) -> str | None:
    """Return the best source of step times that all runs have."""
    return best_times(run for side in sides for run in side.runs)


_Values = tuple[Array, list[list[Array]]]  # steps that all runs have, and the values of each run there, by side


def _common(base: Side, new: Side, of: Callable[[RunLog], Series], warmup: int | None) -> _Values:
    series = [[of(run) for run in side.runs] for side in (base, new)]
    steps = reduce(np.intersect1d, [each.steps for side in series for each in side])
    if len(steps) > 1:
        skipped = 0.1 * (steps[-1] - steps[0]) if warmup is None else warmup
        steps = steps[steps >= steps[0] + skipped]
    return steps, [[each.values[np.searchsorted(each.steps, steps)] for each in side] for side in series]


def _step_times(base: Side, new: Side, warmup: int | None) -> Iterator[Effect]:
    if (kind := kind_of_times([base, new])) is None:
        return
    steps, sides = _common(base, new, lambda run: run.times[kind], warmup)
    is_timed = np.all([np.isfinite(values) & (values > 0) for side in sides for values in side], axis=0)
    note, without = f"from {kind}", len(steps) - int(is_timed.sum())
    if without > _UNTIMED * len(steps):
        note += f": {without} of {len(steps)} steps take 0 s"
        yield Effect(STEP, nan, nan, Estimate(nan), 0, "not tested", note)
        return
    if without:
        note += f", {without} steps of 0 s left out"
        steps, sides = steps[is_timed], [[values[is_timed] for values in side] for side in sides]
    yield _speed(STEP, steps, sides, note=note)
    if kind in EACH_STEP and len(steps):
        mean = float(np.mean(sides[0]))
        found, *levels = _difference([[values / mean for values in side] for side in sides], typical=False)
        verdict = _verdict(found, alone=_alone(sides), floor=FLOOR)
        yield Effect(MEAN_STEP, levels[0] * mean, levels[1] * mean, found, len(steps), verdict, "with slow steps")


def _speed(name: str, steps: Array, sides: list[list[Array]], note: str = "") -> Effect:
    """Compare typical values by their ratio, or by their difference if some are not positive."""
    if not len(steps):
        return Effect(name, nan, nan, Estimate(nan), 0, "not tested", "no step in common")
    relative = all(bool(np.all(values > 0)) for side in sides for values in side)
    found, *levels = (_ratio if relative else _difference)(sides)
    verdict = _verdict(found, alone=_alone(sides), floor=FLOOR if relative else 0)
    return Effect(name, levels[0], levels[1], found, len(steps), verdict, note, relative=relative)


def _metric(name: str, base: Side, new: Side) -> Effect:
    """Compare the means over the last tenth of the steps, at least 10 of them and at most half.

    A loss that still falls is compared by its ratio, which changes less than the difference.
    """
    steps, sides = _common(base, new, lambda run: run.series[name], 0)
    kept = max(1, min(len(steps) // 2, max(10, len(steps) // 10)))
    broken = _not_finite(name, base, new, since=steps[-kept] if len(steps) else -inf)
    note = ", ".join(f"{run} is not finite at step {step:.0f}" for run, step in broken.values())
    if not len(steps):
        verdict = "not finite" if broken else "not tested"
        note = note or "no step in common"
        return Effect(name, nan, nan, Estimate(nan), 0, verdict, note, relative=False, not_finite=broken)
    ends = [[values[-kept:] for values in side] for side in sides]
    halves = {key: _if_falling(values) for key, values in zip(("base", "new"), ends, strict=True)}
    falling = {key: half for key, half in halves.items() if half is not None}
    relative = bool(falling) and all(bool(np.all(values > 0)) for side in ends for values in side)
    found, *levels = (_ratio if relative else _difference)(ends, typical=False)
    if falling and not note:
        note = f"still falling: {' and '.join(f'{first:.3g} to {last:.3g}' for first, last in falling.values())}"
    verdict = _verdict(found, alone=False)
    if _alone(sides):
        verdict = "beyond batch noise" if verdict == "significant" else verdict
        differs = ~np.isclose(sides[0][0], sides[1][0], rtol=0, atol=0, equal_nan=True)
        if not differs.any():
            verdict, found = "identical", Estimate(0.0, 0.0, 0.0)
        elif differs.argmax():
            note = note or f"identical before step {steps[differs.argmax()]:.0f}"
    verdict = "not finite" if broken else verdict
    level, other = levels
    return Effect(name, level, other, found, kept, verdict, note, relative=relative, falling=falling, not_finite=broken)


def _if_falling(runs: Sequence[Array]) -> tuple[float, float] | None:
    """Return the means of both halves of the runs' mean curve if the second is clearly lower, or None."""
    curve = np.mean(runs, axis=0)
    if len(curve) < FEWEST or not np.all(np.isfinite(curve)):
        return None
    first, last = (float(np.mean(half)) for half in np.array_split(curve, 2))
    steps = np.arange(len(curve))
    is_clear = first - last > _FALL * abs(first) and np.corrcoef(steps, curve)[0, 1] < -_TREND
    return (first, last) if is_clear else None


def _not_finite(name: str, base: Side, new: Side, *, since: float) -> dict[str, tuple[str, float]]:
    """Return the run of each side that is the first with a value that is not finite, and the step."""
    found: dict[str, tuple[str, float]] = {}
    for key, side in (("base", base), ("new", new)):
        for run in side.runs:
            series = run.series[name]
            steps = series.steps[~np.isfinite(series.values) & (series.steps >= since)]
            if len(steps) and (key not in found or steps[0] < found[key][1]):
                found[key] = (side.name if len(side.runs) == 1 else run.name, float(steps[0]))
    return found


def _difference(sides: list[list[Array]], *, typical: bool = True) -> tuple[Estimate, float, float]:
    """Return the difference, and the level of each side."""
    levels = [[float(np.median(values) if typical else np.mean(values)) for values in side] for side in sides]
    found = paired(sides[0][0], sides[1][0], typical=typical) if _alone(sides) else groups(*levels)
    return found, float(np.mean(levels[0])), float(np.mean(levels[1]))


def _ratio(sides: list[list[Array]], *, typical: bool = True) -> tuple[Estimate, float, float]:
    """Return the ratio less one, and the level of each side, of values above zero."""
    found, base, new = _difference([[np.log(values) for values in side] for side in sides], typical=typical)
    shares = (exp(min(each, 700)) - 1 for each in (found.value, found.low, found.high))
    return Estimate(*shares), exp(base), exp(new)


def _alone(sides: Sequence[Sequence[Any]]) -> bool:
    return all(len(side) == 1 for side in sides)


def _verdict(estimate: Estimate, *, alone: bool, floor: float = 0.0) -> str:
    if not isfinite(estimate.low):
        return "not tested"
    return "significant" if estimate.excludes(0) and abs(estimate.value) >= (floor if alone else 0) else "noise"
