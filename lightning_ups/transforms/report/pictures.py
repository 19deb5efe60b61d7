"""The same charts as PNG files, by matplotlib where it is installed."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_ups._compat.optional import require
from lightning_ups.transforms.report.history import Chart

__all__ = ["can_draw", "write_pictures"]

_REQUIREMENT = "matplotlib>=3.8"


def can_draw() -> Any:
    """Return matplotlib's module of figures.

    Raises:
        ModuleNotFoundError: If it is not installed.
        ImportError: If it cannot be loaded.
    """
    return require("matplotlib.figure", requirement=_REQUIREMENT, extra="report", feature="A report with PNGs")


def write_pictures(folder: Path, *, charts: Sequence[Chart], split: Mapping[str, float]) -> list[Path]:
    """Write a PNG for each chart, and one for the split of a step, into ``folder``, and return their paths."""
    figures = can_draw()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")  # no window, no backend, no global state
        axes = figure.subplots()
        for name, points in chart.series.items():
            finite = [point for point in points if isfinite(point[1])]
            axes.plot([x for x, _ in finite], [y for _, y in finite], label=name, linewidth=1.4)
        if len(chart.series) > 1:
            axes.legend(frameon=False)
        axes.set_title(chart.title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        written.append(_saved(figure, folder, f"{chart.section}-{chart.title}"))
    if split:
        figure = figures.Figure(figsize=(8.0, 2.2), layout="constrained")
        axes, left = figure.subplots(), 0.0
        for name, share in split.items():
            axes.barh([0], [share], left=left, label=f"{name} {share:.1%}")
            left += share
        axes.set_title("split of a step")
        axes.set_yticks([])
        axes.set_xlim(0, 1)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        written.append(_saved(figure, folder, "split"))
    return written


def _saved(figure: Any, folder: Path, name: str) -> Path:
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png"
    figure.savefig(path, dpi=120)
    return path
