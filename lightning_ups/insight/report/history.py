"""The history of logged values, in memory of constant size, grouped into charts."""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from numbers import Real
from typing import Any

Point = tuple[float, float]  # step, value

_MOST_STRETCHES = 200  # of a series; even
_MOST_CURVES = 200  # a page with more charts opens slowly
_NO_SERIES = ("epoch", "hp_metric")  # logged by Lightning itself
_STAGE = "(train|training|val|valid|validation|test)"
_PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")

_OURS: tuple[tuple[str, str, str], ...] = (  # pattern of names, title, section
    (r"throughput/.+_per_s(_per_device)?", "{unit} per second", "Speed"),
    (r"throughput/(step_ms|step_p95_ms)", "step, ms", "Speed"),
    (rf"throughput/({'|'.join(_PHASES)})_ms", "split of a step, ms", "Speed"),
    (r"throughput/(mfu|hfu|mfu_mixed)", "utilisation of FLOPs", "Speed"),
    (r"memory/.+_gib", "peak memory, GiB", "Memory"),
    (r"memory/.+", "", "Memory"),
    (r"gpu/.+", "", "GPU"),
    (r"checkpoint/.+", "", "Time of saving"),
    (r"guard/.+", "steps that went wrong", "Guard"),
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of one or more series of points, by name, under the heading of a section."""

    title: str
    section: str
    series: Mapping[str, Sequence[Point]]


class _Series:
    """A series in memory of constant size, as stretches of equally many points, which double when there are too many.

    A stretch has its lowest point, its highest, and the first that is not finite, each as step and value, or NaN.
    """

    def __init__(self) -> None:
        self._kept = array("d")
        self._width = self._filled = 1

    def add(self, step: float, value: float) -> None:
        one = (step, value, step, value, nan, nan) if isfinite(value) else (nan, nan, nan, nan, step, value)
        if self._filled < self._width:
            self._kept[-6:] = array("d", _joined(self._kept[-6:], one))
            self._filled += 1
            return
        if len(self._kept) == 6 * _MOST_STRETCHES:
            rows = self._rows()
            self._kept = array("d", [x for a, b in zip(rows[::2], rows[1::2], strict=True) for x in _joined(a, b)])
            self._width *= 2
        self._kept.extend(one)
        self._filled = 1

    def points(self) -> list[Point]:
        """Return the kept points, by step."""
        return [point for row in self._rows() for point in _points(row)]

    def _rows(self) -> list[Sequence[float]]:
        return [self._kept[i : i + 6] for i in range(0, len(self._kept), 6)]


def _joined(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    low = b if isnan(a[0]) or b[1] < a[1] else a
    high = b if isnan(a[2]) or b[3] > a[3] else a
    bad = b if isnan(a[4]) else a
    return (low[0], low[1], high[2], high[3], bad[4], bad[5])


def _points(row: Sequence[float]) -> list[Point]:
    return sorted(
        {(x, y) for x, y in zip(row[::2], row[1::2], strict=True) if not isnan(x)}, key=lambda point: point[0]
    )


class History:
    """Collects logged values, in memory that does not grow with the length of a run."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    @property
    def series(self) -> dict[str, list[Point]]:
        """The points by name; of a long series, the lowest and highest of each stretch."""
        return {name: series.points() for name, series in self._series.items()}

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a point to each series, ignoring values that are not numbers."""
        for name, value in metrics.items():
            if name not in _NO_SERIES and isinstance(value, Real):
                self._series.setdefault(str(name), _Series()).add(float(step), float(value))

    def charts(self, *, most: int = _MOST_CURVES) -> list[Chart]:
        """Return the charts, at most ``most`` of the user's first, with training and validation in one chart."""
        order = ["Curves", "Speed", "Memory", "GPU", "Time of saving", "Guard"]
        groups, _ = self._groups(most)
        return [
            Chart(
                title=names[0] if section == "Curves" and len(names) == 1 else title,
                section=section,
                series=_merged({_short(name, section): self._series[name].points() for name in names}),
            )
            for (section, title), names in sorted(groups.items(), key=lambda item: order.index(item[0][0]))
        ]

    def left_out(self, *, most: int = _MOST_CURVES) -> list[str]:
        """Return the names of series without a chart."""
        return self._groups(most)[1]

    def _groups(self, most: int) -> tuple[dict[tuple[str, str], list[str]], list[str]]:
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self._series:
            groups.setdefault(_place(name), []).append(name)
        curves = [place for place in groups if place[0] == "Curves"]
        return groups, [name for place in curves[most:] for name in groups.pop(place)]


def _place(name: str) -> tuple[str, str]:
    for pattern, title, section in _OURS:
        if re.fullmatch(pattern, name):
            unit = re.sub(r"^throughput/(.+?)_per_s.*$", r"\1", name)
            return section, title.format(unit=unit) or name.partition("/")[2]
    bare = re.sub(r"_(step|epoch)$", "", name)
    return "Curves", re.sub(rf"^{_STAGE}[_/.]|[_/.]{_STAGE}$", "", bare)


def _merged(series: Mapping[str, list[Point]]) -> dict[str, list[Point]]:
    """Merge equal series under both names, since one would hide the other."""
    merged: dict[str, list[Point]] = {}
    for name, points in series.items():
        equal = next((other for other, there in merged.items() if there == points), None)
        merged[name if equal is None else f"{equal} = {name}"] = merged.pop(equal) if equal is not None else points
    return merged


def _short(name: str, section: str) -> str:
    if section == "Curves":
        return name
    return re.sub(r"(_ms|_gib|_per_s)$", "", name.partition("/")[2]).replace("_per_s_per_device", " per device")
