"""What differed between two sides of one or more runs, and what effect that had."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import exp, isfinite
from typing import Any

import numpy as np

from lightning_ups.insight.compare.intervals import Array, Estimate, groups, paired
from lightning_ups.insight.compare.reading import RunLog, Series, best_times

FLOOR = 0.01  # two equal runs on one machine differ by up to about that in speed, which one run per side cannot show
STEP, MEAN_STEP = "step time, typical", "step time, mean"
_EACH_STEP = ("step_times.csv", "a column")
_SPEED = re.compile(r"(throughput|memory|gpu)/.+|.*(_per_s|_per_sec|_per_second|it_per_s)")
_REPEATED = re.compile(r"throughput/(step_ms|step_p95_ms|.+_per_s_per_device)")
_LAST = ("versions", "host", "device", "code", "environment")  # of the settings, for people
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Side:
    """One or more runs of one configuration."""

    name: str
    runs: Sequence[RunLog]


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """

    name: str
    base: float
    new: float
    difference: Estimate
    relative: bool
    points: int
    verdict: str
    note: str = ""


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
    found += [_speed(name, *_common(name, base, new, warmup)) for name in speed]
    return found + [_metric(name, *_common(name, base, new, 0)) for name in metrics]


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


# A series of each run at the steps that all have: those of base, and those of new
_Values = tuple[Array, list[Array], list[Array]]


def _common(name: str, base: Side, new: Side, warmup: int | None, *, times: bool = False) -> _Values:
    def of(run: RunLog) -> Series:
        return (run.times if times else run.series)[name]

    series = [[of(run) for run in side.runs] for side in (base, new)]
    steps = reduce(np.intersect1d, [each.steps for side in series for each in side])
    if len(steps) > 1:
        skipped = 0.1 * (steps[-1] - steps[0]) if warmup is None else warmup
        steps = steps[steps >= steps[0] + skipped]
    at = [[each.values[np.searchsorted(each.steps, steps)] for each in side] for side in series]
    return steps, at[0], at[1]


def _step_times(base: Side, new: Side, warmup: int | None) -> Iterator[Effect]:
    kind = best_times([*base.runs, *new.runs])
    if kind is None:
        return
    steps, *sides = _common(kind, base, new, warmup, times=True)
    note = f"from {kind}" if len(steps) else f"no step in common, by {kind}"
    yield _speed(STEP, steps, *sides, note=note)
    if kind in _EACH_STEP and len(steps):
        mean = float(np.mean(sides[0]))
        scaled = [[values / mean for values in side] for side in sides]
        estimate, base_mean, new_mean = _difference(*scaled, typical=False)
        yield Effect(
            name=MEAN_STEP,
            base=base_mean * mean,
            new=new_mean * mean,
            difference=estimate,
            relative=True,
            points=len(steps),
            verdict=_verdict(estimate, alone=_alone(*sides), floor=FLOOR),
            note="with slow steps",
        )


def _speed(name: str, steps: Array, base: list[Array], new: list[Array], note: str = "") -> Effect:
    """Compare typical values by their ratio, or by their difference if some are not positive."""
    relative = all(bool(np.all(values > 0)) for values in [*base, *new])
    sides = [[np.log(values) if relative else values for values in side] for side in (base, new)]
    estimate, *levels = _difference(*sides) if len(steps) else (Estimate(np.nan), np.nan, np.nan)
    if relative:
        estimate = Estimate(*(exp(each) - 1 for each in (estimate.value, estimate.low, estimate.high)))
        levels = [exp(level) for level in levels]
    return Effect(
        name=name,
        base=levels[0],
        new=levels[1],
        difference=estimate,
        relative=relative,
        points=len(steps),
        verdict=_verdict(estimate, alone=_alone(base, new), floor=FLOOR if relative else 0),
        note=note,
    )


def _metric(name: str, steps: Array, base: list[Array], new: list[Array]) -> Effect:
    """Compare the means over the last tenth of the steps, at least 10 of them and at most half."""
    kept = max(1, min(len(steps) // 2, max(10, len(steps) // 10)))
    ends = [[values[-kept:] for values in side] for side in (base, new)]
    estimate, *levels = _difference(*ends, typical=False) if len(steps) else (Estimate(np.nan), np.nan, np.nan)
    verdict, note = _verdict(estimate, alone=False), "" if len(steps) else "no step in common"
    if _alone(base, new):
        verdict = "beyond batch noise" if verdict == "significant" else verdict
        differs = ~((base[0] == new[0]) | (np.isnan(base[0]) & np.isnan(new[0])))
        if len(steps) and not differs.any():
            verdict, estimate = "identical", Estimate(0.0, 0.0, 0.0)
        elif len(steps) and differs.argmax():
            note = f"identical before step {steps[differs.argmax()]:.0f}"
    if len(steps) and not all(np.isfinite(values).all() for side in ends for values in side):
        verdict = "not finite"
    return Effect(
        name=name,
        base=levels[0],
        new=levels[1],
        difference=estimate,
        relative=False,
        points=kept if len(steps) else 0,
        verdict=verdict,
        note=note,
    )


def _difference(base: list[Array], new: list[Array], *, typical: bool = True) -> tuple[Estimate, float, float]:
    """Return the difference, and the level of each side."""
    levels = [[_level(values, typical=typical) for values in side] for side in (base, new)]
    found = paired(base[0], new[0], typical=typical) if _alone(base, new) else groups(*levels)
    return found, float(np.mean(levels[0])), float(np.mean(levels[1]))


def _level(values: Array, *, typical: bool) -> float:
    return float(np.median(values) if typical else np.mean(values))


def _alone(base: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(base) == len(new) == 1


def _verdict(estimate: Estimate, *, alone: bool, floor: float = 0.0) -> str:
    if not isfinite(estimate.low):
        return "not tested"
    return "significant" if estimate.excludes(0) and abs(estimate.value) >= (floor if alone else 0) else "noise"
