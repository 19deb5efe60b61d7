"""The HTML page of `ablate` and `tune`: tables, bars with intervals, and the frontier of speed and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from lightning_ups.insight.report import Content, page
from lightning_ups.insight.tune.effects import Gain

_WIDTH, _ROW, _NAME = 920, 30, 310
_TEXT = 250  # beside the longest bar
_LETTER, _LABEL = 7.2, 40  # the width of a letter; the most letters of a label
_SHORT = 28  # letters of a cell that stays on one line
_COLORS = {"harmful": "c1", "neutral": "c7"}
_FEW = 8  # configurations that all have labels


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar: its length, the text at its end, an interval around its end, and the class of its color."""

    name: str
    value: float
    text: str
    interval: tuple[float, float] | None = None
    color: str = "c0"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A configuration in the chart of speed and memory."""

    name: str
    rate: float
    gib: float
    is_chosen: bool = False
    is_reference: bool = False


def html_page(
    title: str, subtitle: str, *, tiles: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str]]
) -> str:
    """Return a self-contained page with sections of a heading and HTML."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return page(Content(title=title, subtitle=subtitle, tiles=tiles)).replace("</main>", f"{body}</main>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(map(_cell, row)) for row in rows)
    return f"<table><tr>{cells}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(text: str) -> str:
    style = "white-space:nowrap" if len(text) <= _SHORT else "overflow-wrap:anywhere"
    return f'<td style="{style}">{escape(text)}</td>'


def bars(rows: Sequence[Bar], *, label: str) -> str:
    """Return horizontal bars from zero as SVG."""
    most = max((max(row.value, *(row.interval or (0,))) for row in rows), default=1.0) or 1.0
    scale = (_WIDTH - _NAME - _TEXT) / most
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(rows) + 8}" role="img" aria-label="{escape(label, quote=True)}">']
    for index, row in enumerate(rows):
        middle = _ROW * index + _ROW / 2 + 4
        end = _NAME + max(1.0, row.value * scale)
        parts.append(_text(_NAME - 10, middle + 4, _shortened(row.name), anchor="end"))
        place = f'x="{_NAME}" y="{middle - 10:.1f}" width="{end - _NAME:.1f}" height="20" rx="2"'
        parts.append(f'<rect class="{row.color}" {place}/>')
        right = end
        if row.interval is not None:
            low, right = (_NAME + max(0.0, value) * scale for value in row.interval)
            for x1, x2, half in ((low, right, 0.0), (low, low, 5.0), (right, right, 5.0)):
                parts.append(
                    f'<line style="stroke:var(--fg)" x1="{x1:.1f}" x2="{x2:.1f}"'
                    f' y1="{middle - half:.1f}" y2="{middle + half:.1f}"/>'
                )
        parts.append(_text(max(end, right) + 8, middle + 4, row.text))
    return "".join([*parts, "</svg>"])


def frontier(spots: Sequence[Spot], *, label: str) -> str:
    """Return throughput over memory as SVG; a line joins the configurations that no other beats in both.

    Labels do not overlap: the best, the reference and the configurations on the line come first. All have tooltips.
    """
    height, left, right, top, bottom = 420, 70, 20, 34, 50
    unit, scale = ("GiB", 1.0) if max((spot.gib for spot in spots), default=1.0) >= 1 else ("MiB", 1024.0)
    xs, ys = (_ticks([spot.gib * scale for spot in spots]), _ticks([spot.rate for spot in spots]))

    def place(spot: Spot) -> tuple[float, float]:
        x, y = (spot.gib * scale - xs[0]) / (xs[-1] - xs[0]), (spot.rate - ys[0]) / (ys[-1] - ys[0])
        return left + x * (_WIDTH - left - right), height - bottom - y * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">']
    for index, tick in enumerate(ys):
        y = height - bottom - index / (len(ys) - 1) * (height - top - bottom)
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:.5g}", anchor="end", kind="tick"))
    for index, tick in enumerate(xs):
        x = left + index / (len(xs) - 1) * (_WIDTH - left - right)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(_text(x, height - bottom + 17, f"{tick:.5g}", anchor="middle", kind="tick"))
    parts.append(
        _text((left + _WIDTH - right) / 2, height - 10, f"peak memory, {unit}; less is better", anchor="middle")
    )
    parts.append(_text(8, 16, "samples per second; more is better"))
    best = sorted((spot for spot in spots if not any(_beats(other, spot) for other in spots)), key=place)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, best))
    parts.append(f'<polyline class="s7" fill="none" points="{line}"/>')
    taken = _Labels((left, top, _WIDTH - right, height - bottom), [place(spot) for spot in spots])
    for spot in sorted(spots, key=lambda spot: (not spot.is_chosen, not spot.is_reference, -spot.rate)):
        x, y = place(spot)
        shown = f"{spot.name}: {spot.rate:.4g} samples/s, {spot.gib * scale:.4g} {unit}"
        color = "c1" if spot.is_chosen else "c3" if spot.is_reference else "c0"
        if spot.is_chosen:
            parts.append(
                f'<circle style="fill:none;stroke:var(--k1);stroke-width:2" cx="{x:.1f}" cy="{y:.1f}" r="10"/>'
            )
        size = 6 if spot.is_chosen or spot.is_reference else 4
        parts.append(
            f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{escape(shown)}</title></circle>'
        )
        if spot.is_chosen or spot.is_reference or spot in best or len(spots) <= _FEW:
            name = f"best: {spot.name}" if spot.is_chosen else spot.name
            parts.append(taken.put(x, y, name))
    return "".join([*parts, "</svg>"])


class _Labels:
    """Places labels next to points so that they overlap neither each other nor a point."""

    def __init__(self, frame: tuple[float, float, float, float], points: Sequence[tuple[float, float]]) -> None:
        self._frame = frame  # left, top, right, bottom
        self._taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]

    def put(self, x: float, y: float, text: str) -> str:
        """Return a label for a point as SVG, or nothing if there is no room for it."""
        text = _shortened(text)
        width = _LETTER * len(text)
        sides = [(x + 14, 0.0, "start"), (x - 14 - width, 0.0, "end"), (x - width / 2, -20.0, "middle")]
        sides += [(x - width / 2, 20.0, "middle"), (x + 14, -18.0, "start"), (x + 14, 18.0, "start")]
        sides += [(x - 14 - width, -18.0, "end"), (x - 14 - width, 18.0, "end")]
        for low, shift, anchor in sides:
            box = (low, y + shift - 8, low + width, y + shift + 8)
            if self._is_free(box):
                self._taken.append(box)
                at = {"start": low, "middle": low + width / 2, "end": low + width}[anchor]
                return _text(at, y + shift + 4, text, anchor=anchor)
        return ""

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = self._frame
        if box[0] < left or box[1] < top - 8 or box[2] > right or box[3] > bottom:
            return False
        return not any(box[0] < x2 and x1 < box[2] and box[1] < y2 and y1 < box[3] for x1, y1, x2, y2 in self._taken)


def _shortened(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}\u2026"


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers at equal distances that contain all values, with room at both ends."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    step = 10.0 ** floor(log10((high - low + 2 * room) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 5 >= high - low + 2 * room)
    first = max(floor((low - room) / step), 0)
    return [step * count for count in range(first, ceil((high + room) / step) + 1)]


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{ceil(size / 2**20)} MiB"


def rate_bar(name: str, rate: float, gain: Gain | None, *, reference: float, verdict: str = "") -> Bar:
    """Return a bar of samples per second, with the interval of its gain over ``reference`` and the verdict."""
    text = ", ".join(filter(None, (f"{rate:.4g}/s" if rate else "", f"{gain.value:+.1%}" if gain else "", verdict)))
    interval = None if gain is None or not gain.is_known else (reference * (1 + gain.low), reference * (1 + gain.high))
    return Bar(name=name, value=rate, text=text, interval=interval, color=_COLORS.get(verdict.partition(";")[0], "c0"))


def _beats(one: Spot, other: Spot) -> bool:
    return one.rate >= other.rate and one.gib <= other.gib and (one.rate, one.gib) != (other.rate, other.gib)


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    look = 'class="tick"' if kind else 'style="fill:var(--fg);font-size:13px"'
    return f'<text {look} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
