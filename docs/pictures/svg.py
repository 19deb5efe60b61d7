"""A few shapes of SVG, on a card of their own so that a picture is readable on light and dark pages."""

from collections.abc import Sequence
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, SOFT, GRID, CARD = "#1f2430", "#667085", "#e4e7ec", "#ffffff"
BLUE, RED, GREY, GREEN, AMBER, VIOLET = "#3f51b5", "#c0392b", "#98a2b3", "#2e8b57", "#d9822b", "#8e5bb5"


def text(
    x: float, y: float, words: str, *, size: float = 12, fill: str = INK, anchor: str = "start", **more: str
) -> str:
    """Return a line of text whose baseline is at ``y``."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    style = f'font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{extra}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, *, round: float = 0, title: str = "", **more: str
) -> str:
    """Return a rectangle, whose ``title`` is shown where the pointer rests on it."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    shown = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} rx="{round:g}" fill="{fill}"{extra}>{shown}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, *, width: float = 1, **more: str) -> str:
    """Return a straight line."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="{width:g}"{extra}/>'


def card(width: int, height: int, shapes: Sequence[str], *, label: str) -> str:
    """Return a whole picture; ``label`` describes it for who cannot see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    start = f'{head} role="img" aria-label="{escape(label)}" font-family="{escape(FONT)}">'
    return "\n".join([start, box(0.5, 0.5, width - 1, height - 1, CARD, round=8, stroke=GRID), *shapes, "</svg>", ""])
