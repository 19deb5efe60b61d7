"""When kernels and collectives of one training step run, from a trace of four GPUs; below, a part of it, larger."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

from pictures import svg

RAW = Path(__file__).parents[2] / "benchmarks/results/2026-11-22_step_profile_8B/8B.trace.json.gz"
LANES = {"compute": r"", "all-gather": r"nccl.*AllGather", "reduce-scatter": r"nccl.*ReduceScatter"}
PART = (0.0, 150.0)  # milliseconds of the step
LEFT, WIDE, TOP, LANE, ROW, PANEL = 120, 760, 92, 20, 26, 134

Span = tuple[float, float]
Lanes = dict[str, list[Span]]


def step(kernels: Iterable[tuple[str, float, float]]) -> Lanes:
    """Return when, in milliseconds, something ran in each lane during the second of the steps that were traced.

    Args:
        kernels: Name, start and length of each, in microseconds.
    """
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    ends = [start + length for name, start, length in kernels if "adamw" in name]
    begin, end = [end for end, after in zip(ends, [*ends[1:], 1e18], strict=True) if after - end > 5e3][:2]
    found: Lanes = {lane: [] for lane in LANES}
    for name, start, length in kernels:
        if begin <= start < end:
            lanes = [lane for lane, names in LANES.items() if names and re.search(names, name)]
            if lanes or "nccl" not in name:
                found[lanes[0] if lanes else "compute"].append(((start - begin) / 1e3, (start + length - begin) / 1e3))
    return {lane: joined(spans) for lane, spans in found.items()}


def joined(spans: list[Span], gap: float = 0.0) -> list[Span]:
    """Return the union of ``spans``, with gaps of at most ``gap`` closed."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return the parts of ``spans`` that no span of ``others`` covers."""
    found = []
    for start, stop in joined(spans):
        at = start
        for begin, end in others:
            if end > at and begin < stop:
                found.append((at, max(at, begin)))
                at = min(end, stop)
        found.append((at, stop))
    return [(start, stop) for start, stop in found if stop > start]


def length(spans: list[Span]) -> float:
    """Return the sum of the lengths."""
    return sum(stop - start for start, stop in spans)


def sums(lanes: Lanes) -> tuple[float, float, float]:
    """Return the milliseconds of the step, of its communication, and of that which is exposed."""
    moved = joined([*lanes["all-gather"], *lanes["reduce-scatter"]])
    end = max(stop for spans in lanes.values() for _, stop in spans)
    return end, length(moved), length(without(moved, lanes["compute"]))


def legend() -> list[str]:
    """Return the shapes that explain the colors."""
    shapes, x = [], 20.0
    for words, color in (("compute", svg.BLUE), ("hidden communication", svg.GREEN), ("exposed", svg.RED)):
        shapes += [svg.box(x, 64, 11, 11, color, round=2), svg.text(x + 16, 74, words, fill=svg.SOFT)]
        x += 40 + 7 * len(words)
    return shapes


def draw() -> str:
    """Return the picture."""
    lanes = step((one["name"], one["ts"], one["dur"]) for one in json.loads(gzip.decompress(RAW.read_bytes())))
    end, moved, exposed = sums(lanes)
    shapes = [
        svg.text(
            20, 32, "One training step of a GPT of 8 B parameters, on each of four H200s", size=18, font_weight="600"
        ),
        svg.text(
            20, 52, "fsdp2 with Compile; communication is exposed where nothing else runs", size=13, fill=svg.SOFT
        ),
    ]
    shapes += legend()
    title = f"The step: {end:.0f} ms; communication runs for {moved:.0f} ms and is exposed for {exposed:.0f} ms"
    shapes += panel(TOP, title, lanes, (0, end))
    shapes += panel(TOP + PANEL, f"Its first {PART[1]:.0f} ms, in the forward", lanes, PART)
    return svg.card(LEFT + WIDE + 24, TOP + 2 * PANEL - 8, shapes, label=title)


def panel(y: float, title: str, lanes: Lanes, part: Span) -> list[str]:
    """Return the shapes of a ``part`` of a step, whose top is at ``y``."""
    scale = WIDE / (part[1] - part[0])
    shapes = [svg.text(20, y + 16, title, size=14, font_weight="600")]
    for row, (lane, spans) in enumerate(lanes.items()):
        top = y + 28 + row * ROW
        shapes += [svg.text(LEFT - 10, top + 14, lane, anchor="end")]
        shapes += [svg.line(LEFT, top + LANE + 2, LEFT + WIDE, top + LANE + 2)]
        color = svg.BLUE if lane == "compute" else svg.GREEN
        drawn = [(span, color) for span in joined(spans, gap=0.2 / scale)]
        drawn += [(span, svg.RED) for span in without(spans, lanes["compute"]) if lane != "compute"]
        for (start, stop), fill in drawn:
            start, stop = max(start, part[0]), min(stop, part[1])
            if stop > start:
                shapes.append(svg.box(LEFT + (start - part[0]) * scale, top, (stop - start) * scale, LANE, fill))
    return shapes
