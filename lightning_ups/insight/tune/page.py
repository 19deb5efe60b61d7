"""The HTML page of `ablate` and `tune`: tables, bars with intervals, and the frontier of speed and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

from lightning_ups.insight.report import Content, page
from lightning_ups.insight.tune.effects import Gain

_WIDTH, _ROW, _NAME = 920, 30, 300


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar: its length, the text at its end, and an interval around its end."""

    name: str
    value: float
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A configuration in the chart of speed and memory."""

    name: str
    rate: float
    gib: float
    is_chosen: bool = False


def html_page(
    title: str, subtitle: str, *, tiles: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str]]
) -> str:
    """Return a self-contained page with sections of a heading and HTML."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return page(Content(title=title, subtitle=subtitle, tiles=tiles)).replace("</main>", f"{body}</main>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{cells}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def bars(rows: Sequence[Bar], *, label: str) -> str:
    """Return horizontal bars from zero as SVG."""
    most = max((max(row.value, *(row.interval or (0,))) for row in rows), default=1.0) or 1.0
    scale = (_WIDTH - _NAME - 190) / most
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(rows) + 8}" role="img" aria-label="{escape(label, quote=True)}">']
    for index, row in enumerate(rows):
        middle = _ROW * index + _ROW / 2 + 4
        end = _NAME + max(1.0, row.value * scale)
        parts.append(_text(_NAME - 10, middle + 4, row.name, anchor="end"))
        parts.append(
            f'<rect class="c0" x="{_NAME}" y="{middle - 10:.1f}" width="{end - _NAME:.1f}" height="20" rx="2"/>'
        )
        right = end
        if row.interval is not None:
            low, right = (_NAME + value * scale for value in row.interval)
            for x1, x2, half in ((low, right, 0.0), (low, low, 5.0), (right, right, 5.0)):
                parts.append(
                    f'<line style="stroke:var(--fg)" x1="{x1:.1f}" x2="{x2:.1f}"'
                    f' y1="{middle - half:.1f}" y2="{middle + half:.1f}"/>'
                )
        parts.append(_text(max(end, right) + 8, middle + 4, row.text))
    return "".join([*parts, "</svg>"])


def frontier(spots: Sequence[Spot], *, label: str) -> str:
    """Return throughput over memory as SVG; a line joins the configurations that no other beats in both."""
    height, left, right, top, bottom = 360, 70, 20, 16, 44
    x_most = 1.08 * max((spot.gib for spot in spots), default=1.0)
    y_most = 1.08 * max((spot.rate for spot in spots), default=1.0)
    places = [
        (
            left + spot.gib / x_most * (_WIDTH - left - right),
            height - bottom - spot.rate / y_most * (height - top - bottom),
        )
        for spot in spots
    ]
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = height - bottom - share * (height - top - bottom)
        x = left + share * (_WIDTH - left - right)
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{share * y_most:.4g}", anchor="end", kind="tick"))
        parts.append(_text(x, height - bottom + 16, f"{share * x_most:.3g}", anchor="middle", kind="tick"))
    parts.append(_text(_WIDTH - right, height - 6, "peak memory, GiB", anchor="end", kind="tick"))
    parts.append(_text(left, top - 4, "samples per second", kind="tick"))
    best = sorted(
        place for spot, place in zip(spots, places, strict=True) if not any(_beats(other, spot) for other in spots)
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in best)
    parts.append(f'<polyline class="s7" fill="none" points="{line}"/>')
    for spot, (x, y) in zip(spots, places, strict=True):
        color, size = ("c1", 6) if spot.is_chosen else ("c0", 4)
        shown = f"{spot.name}: {spot.rate:.4g} samples/s, {spot.gib:.3g} GiB"
        parts.append(
            f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{escape(shown)}</title></circle>'
        )
        if spot.is_chosen:
            parts.append(_text(x - 10, y + 4, spot.name, anchor="end"))
    return "".join([*parts, "</svg>"])


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{ceil(size / 2**20)} MiB"


def rate_bar(name: str, rate: float, gain: Gain | None, *, reference: float) -> Bar:
    """Return a bar of samples per second, with the interval of its gain over ``reference``."""
    text = f"{rate:.4g}/s" if gain is None else f"{rate:.4g}/s, {gain.value:+.1%}"
    interval = None if gain is None or not gain.is_known else (reference * (1 + gain.low), reference * (1 + gain.high))
    return Bar(name=name, value=rate, text=text, interval=interval)


def _beats(one: Spot, other: Spot) -> bool:
    return one.rate >= other.rate and one.gib <= other.gib and (one.rate, one.gib) != (other.rate, other.gib)


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    look = 'class="tick"' if kind else 'style="fill:var(--fg);font-size:13px"'
    return f'<text {look} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
