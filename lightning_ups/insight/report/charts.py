"""SVG charts: lines over steps, and a stacked bar."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from lightning_ups.insight.report.history import Point

Scale = Callable[[float], float]

_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 30


def line_chart(series: Mapping[str, Sequence[Point]], *, label: str) -> str:
    """Return lines over steps, on a logarithmic scale if positive values span more than three powers of ten.

    A value that is not finite is a gap with a mark at the upper edge.
    """
    finite = [point for points in series.values() for point in points if isfinite(point[1])]
    if not finite:
        return f'<p class="none">{escape(label)}: no finite value.</p>'
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    logarithmic = is_logarithmic(ys)
    bottom, top = (floor(log10(min(ys))), ceil(log10(max(ys)))) if logarithmic else _padded(min(ys), max(ys))
    left, right = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        height = log10(y) if logarithmic else y
        return _HEIGHT - _BOTTOM - (height - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    powers = range(int(bottom), int(top) + 1, max(1, ceil((top - bottom) / 8)))
    ticks = [10.0**power for power in powers] if logarithmic else _ticks(bottom, top)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">']
    parts += [_horizontal(y_of(tick), number(tick)) for tick in ticks]
    parts += [_below(x_of(tick), number(tick)) for tick in _ticks(left, right, most=5) if left <= tick <= right]
    for index, (name, points) in enumerate(series.items()):
        parts += _line(name, points, color=index % 8, x_of=x_of, y_of=y_of)
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">step</text></svg>')
    return "".join(parts) + (_legend([*series]) if len(series) > 1 else "")


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether ``values`` are drawn on a logarithmic scale."""
    return min(values) > 0 and max(values) / min(values) > 1e3


def split_bar(shares: Mapping[str, float]) -> str:
    """Return a stacked bar of ``shares``, with a legend."""
    parts, x = [f'<svg viewBox="0 0 {2 * _WIDTH} 40" role="img" aria-label="split of a step">'], 0.0
    for index, (name, share) in enumerate(shares.items()):
        width = share * 2 * _WIDTH
        text = f"{name} {share:.1%}"
        parts.append(
            f'<rect class="c{index % 8}" x="{x:.1f}" y="4" width="{max(0.0, width - 2):.1f}" height="32" rx="2">'
            f"<title>{escape(text)}</title></rect>"
        )
        x += width
    return "".join([*parts, "</svg>"]) + _legend([f"{name} {share:.1%}" for name, share in shares.items()])


def number(value: float) -> str:
    """Return ``value`` in few characters."""
    size = abs(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if size >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def _line(name: str, points: Sequence[Point], *, color: int, x_of: Scale, y_of: Scale) -> Iterator[str]:
    for run in _runs(points):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in run)
        yield f'<polyline class="s{color}" points="{path}"><title>{escape(name)}</title></polyline>'
    few = sum(isfinite(y) for _, y in points) <= 40
    for x, y in points:
        if not isfinite(y):
            yield _dot(f"bad c{color}", x_of(x), _TOP, f"{name}: {y} at step {x:.0f}")
        elif few:
            yield _dot(f"c{color}", x_of(x), y_of(y), f"{name}: {number(y)} at step {x:.0f}")


def _dot(kind: str, x: float, y: float, text: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{escape(text)}</title></circle>'


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    run: list[Point] = []
    for point in points:
        if isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _horizontal(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _below(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{text}</text>'


def _legend(names: Sequence[str]) -> str:
    items = (f'<li><i class="b{index % 8}"></i>{escape(name)}</li>' for index, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < (high - low) else low - margin), high + margin


def _ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = ceil(low / step)
    return [index * step for index in range(first, floor(high / step) + 1)]
