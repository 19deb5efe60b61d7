"""How many times as fast each module of the zoo trains with `preset: h100`: one bar for each, from raw output."""

import math
import statistics
from collections import defaultdict

import zoo_results
from pictures import svg

WIDTH, HEIGHT, TOP, BOTTOM, LEFT = 960, 400, 84, 276, 84
BAR, LEAST, MOST = 7.3, 0.65, 12.0


def height(ratio: float) -> float:
    """Return where a ratio is on the axis, which is logarithmic."""
    return BOTTOM - (BOTTOM - TOP) * math.log(ratio / LEAST) / math.log(MOST / LEAST)


def draw() -> str:
    """Return the picture."""
    found = zoo_results.speedups()
    median = statistics.median(ratio for _, ratio in found.values())
    families = defaultdict(list)
    for name, (family, ratio) in found.items():
        families[family].append((ratio, name))
    shapes = [
        svg.text(
            20, 32, f"Training speed of {len(found)} unmodified modules of other libraries", size=18, font_weight="600"
        ),
        svg.text(
            20,
            54,
            "preset: h100 compared with Lightning's bf16-mixed, on one H100 or H200; a bar for each module",
            size=13,
            fill=svg.SOFT,
        ),
    ]
    for ratio in (1, 2, 4, 8):
        y = height(ratio)
        shapes += [
            svg.line(LEFT, y, WIDTH - 16, y, svg.GREY if ratio == 1 else svg.GRID),
            svg.text(LEFT - 8, y + 4, f"{ratio}x", fill=svg.SOFT, anchor="end"),
        ]
    x, edge = LEFT + 6.0, height(1)
    ordered = sorted(families.items(), key=lambda item: -statistics.geometric_mean(ratio for ratio, _ in item[1]))
    for family, members in ordered:
        start = x
        for ratio, name in sorted(members, reverse=True):
            y = height(ratio)
            fill = svg.BLUE if ratio >= 0.98 else svg.RED
            shapes.append(
                svg.box(x, min(y, edge), BAR - 1.2, max(abs(y - edge), 1), fill, title=f"{name}: {ratio:.2f}x")
            )
            x += BAR
        middle = (start + x - 1.2) / 2
        title = f"{family} ({len(members)})"
        turned = f"rotate(-45 {middle:g} {BOTTOM + 16})"
        shapes.append(svg.text(middle + 4, BOTTOM + 16, title, size=11, anchor="end", transform=turned))
        x += (WIDTH - 16 - LEFT - 6 - BAR * len(found)) / len(families)
    y = height(median)
    shapes.append(svg.line(LEFT, y, WIDTH - 16, y, svg.AMBER, width=1.5, stroke_dasharray="6 4"))
    shapes.append(svg.line(WIDTH - 160, 50, WIDTH - 126, 50, svg.AMBER, width=1.5, stroke_dasharray="6 4"))
    shapes.append(svg.text(WIDTH - 118, 54, f"median {median:.2f}x", size=13, fill="#a85b10", font_weight="600"))
    return svg.card(WIDTH, HEIGHT, shapes, label=f"Speed-up of {len(found)} modules; the median is {median:.2f} times")
