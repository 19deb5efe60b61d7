"""The charts as PNG files, by matplotlib."""

import re
import warnings
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_ups._compat.optional.packages import require
from lightning_ups.insight.report.charts import is_logarithmic
from lightning_ups.insight.report.history import Chart
from lightning_ups.insight.report.html_page import readable
from lightning_ups.insight.report.manifest import reserve

_REQUIREMENT = "matplotlib>=3.8"
_MOST = 40  # each takes tenths of a second


def can_draw() -> Any:
    """Return ``matplotlib.figure``.

    Raises:
        ModuleNotFoundError: If it is not installed.
        ImportError: If it cannot be loaded.
    """
    return require("matplotlib.figure", requirement=_REQUIREMENT, extra="report", feature="A report with PNGs")


def write_pictures(folder: Path, *, charts: Sequence[Chart], split: Mapping[str, float]) -> list[Path]:
    """Write a PNG for each chart, at most 40, and one for the split of a step, and return their paths."""
    figures = can_draw()
    written: list[Path] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the font has no such script
        _write(figures, folder, charts, split, written)
    return written


def _write(
    figures: Any, folder: Path, charts: Sequence[Chart], split: Mapping[str, float], written: list[Path]
) -> None:
    curves = [chart for chart in charts if chart.section == "Curves"]
    others = [chart for chart in charts if chart.section != "Curves"]
    for chart in [*curves[: max(0, _MOST - len(others))], *others]:
        figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")  # without a window or global state
        axes = figure.subplots()
        drawn: list[float] = []
        for name, points in chart.series.items():
            finite = [point for point in points if isfinite(point[1])]
            drawn += [y for _, y in finite]
            axes.plot([x for x, _ in finite], [y for _, y in finite], label=_plain(name), linewidth=1.4)
        if drawn and is_logarithmic(drawn):
            axes.set_yscale("log")
        if len(chart.series) > 1:
            axes.legend(frameon=False)
        axes.set_title(_plain(chart.title))
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


def _plain(text: str) -> str:
    """Escape ``text`` for matplotlib, which reads formulas and hides legends that begin with an underscore."""
    shown = readable(text if len(text) <= 60 else f"{text[:57]}...").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _saved(figure: Any, folder: Path, name: str) -> Path:
    stem = re.sub(r"\W+", "-", readable(name).lower()).strip("-")[:60]
    path = reserve(folder, name=stem, ending=".png")
    figure.savefig(path, dpi=120)
    return path
