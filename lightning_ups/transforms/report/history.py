"""What was logged, as series of points, and which of them belong into one chart."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

__all__ = ["Chart", "History", "Point"]

Point = tuple[float, float]  # step, value

_MOST_POINTS = 400  # of a series in a chart: more than a screen shows
_NO_SERIES = ("epoch", "hp_metric")  # Lightning's own: the first grows by one, the second is -1 for ever
_PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")

_OURS: tuple[tuple[str, str, str], ...] = (  # pattern of names, title, section
    (r"throughput/.+_per_s(_per_device)?", "{unit} per second", "Speed"),
    (r"throughput/(step_ms|step_p95_ms)", "step, ms", "Speed"),
    (rf"throughput/({'|'.join(_PHASES)})_ms", "split of a step, ms", "Speed"),
    (r"throughput/(mfu|hfu|mfu_mixed)", "utilisation of FLOPs", "Speed"),
    (r"memory/.+_gib", "peak memory, GiB", "Memory"),
    (r"memory/.+", "", "Memory"),
    (r"gpu/.+", "", "GPU"),
    (r"checkpoint/.+", "", "Checkpoints"),
    (r"guard/.+", "steps that went wrong", "Guard"),
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series that are drawn together.

    Args:
        title: What they show.
        section: Under which heading.
        series: Points of each, by its name.
    """

    title: str
    section: str
    series: Mapping[str, Sequence[Point]]


class History:
    """Collects what is logged."""

    def __init__(self) -> None:
        self.series: dict[str, list[Point]] = {}

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a point to each series; what is no number is left out."""
        for name, value in metrics.items():
            if name not in _NO_SERIES and isinstance(value, (int, float)):
                self.series.setdefault(name, []).append((float(step), float(value)))

    def charts(self) -> list[Chart]:
        """Return the charts, the user's own first, training and validation of one thing together."""
        groups: dict[tuple[str, str], dict[str, list[Point]]] = {}
        for name, points in self.series.items():
            groups.setdefault(_place(name), {})[name] = points
        order = ["Curves", "Speed", "Memory", "GPU", "Checkpoints", "Guard"]
        return [
            Chart(
                title=title,
                section=section,
                series=_merged({_short(name, section): thinned(points) for name, points in series.items()}),
            )
            for (section, title), series in sorted(groups.items(), key=lambda item: order.index(item[0][0]))
        ]


def _place(name: str) -> tuple[str, str]:
    for pattern, title, section in _OURS:
        if re.fullmatch(pattern, name):
            unit = re.sub(r"^throughput/(.+?)_per_s.*$", r"\1", name)
            return section, title.format(unit=unit) or name.partition("/")[2]
    bare = re.sub(r"^(train|training|val|valid|validation|test)[_/.]", "", name)
    return "Curves", re.sub(r"_(step|epoch)$", "", bare)


def _merged(series: Mapping[str, list[Point]]) -> dict[str, list[Point]]:
    """Return ``series`` with those that are equal as one, under both names: the second would hide the first."""
    merged: dict[str, list[Point]] = {}
    for name, points in series.items():
        equal = next((other for other, there in merged.items() if there == points), None)
        merged[name if equal is None else f"{equal} = {name}"] = merged.pop(equal) if equal is not None else points
    return merged


def _short(name: str, section: str) -> str:
    if section == "Curves":
        return name
    return re.sub(r"(_ms|_gib|_per_s)$", "", name.partition("/")[2]).replace("_per_s_per_device", " per device")


def thinned(points: Sequence[Point], *, most: int = _MOST_POINTS) -> list[Point]:
    """Return at most ``most`` of ``points``: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return [*points]
    kept: list[Point] = []
    stretches = most // 2
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        finite = [point for point in stretch if isfinite(point[1])] or [stretch[0]]
        kept += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return kept
