"""Speed and memory of a GPT of 1.5 B parameters with each way to compile and to recompute, from raw output."""

import json
from pathlib import Path

from pictures import svg

RAW = Path(__file__).parents[2] / "benchmarks/results/2026-11-21_compile_and_checkpoint/result.json"
CASES = {  # the label, and where it is placed
    "eager": ("as it is", "end"),
    "eager + matmuls": ('ActivationCheckpoint(save="matmuls")', "start"),
    "eager + nothing": ('ActivationCheckpoint(save="nothing")', "start"),
    "compile": ("Compile()", "start"),
    "compile + matmuls": ('Compile() and save="matmuls"', "end"),
    "compile + nothing": ('Compile() and save="nothing"', "start"),
    "compile model": ('Compile(scope="model")', "start"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 860, 400, 70, 76, 350, 826
MEMORY, SPEED = (40, 70), (42, 68)  # GiB, thousands of tokens per second


def draw() -> str:
    """Return the picture: better is up and to the left."""
    runs = {run["case"]: run for run in json.loads(RAW.read_text())}
    shapes = [
        svg.text(20, 32, "Speed and memory of a GPT of 1.5 B parameters on one H200", size=18, font_weight="600"),
        svg.text(
            20,
            52,
            "tokens per second and peak memory, batch 4, sequence 4096; better is up and to the left",
            size=13,
            fill=svg.SOFT,
        ),
    ]
    for gib in range(MEMORY[0], MEMORY[1] + 1, 5):
        x = _x(gib)
        shapes += [svg.line(x, TOP, x, BOTTOM), svg.text(x, BOTTOM + 18, f"{gib} GiB", fill=svg.SOFT, anchor="middle")]
    for speed in range(45, SPEED[1], 5):
        y = _y(speed)
        shapes += [svg.line(LEFT, y, RIGHT, y), svg.text(LEFT - 8, y + 4, f"{speed} K", fill=svg.SOFT, anchor="end")]
    shapes.append(svg.text((LEFT + RIGHT) / 2, BOTTOM + 38, "peak memory", size=13, fill=svg.SOFT, anchor="middle"))
    for case, (label, anchor) in CASES.items():
        x, y = _x(runs[case]["peak_gib"]), _y(runs[case]["tok_s"] / 1000)
        fill = svg.BLUE if "compile" in case else svg.GREY
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{fill}"/>')
        shapes.append(svg.text(x + (11 if anchor == "start" else -11), y + 5, label, size=13, anchor=anchor))
    return svg.card(WIDTH, HEIGHT, shapes, label="Speed and memory with seven settings")


def _x(gib: float) -> float:
    return LEFT + (RIGHT - LEFT) * (gib - MEMORY[0]) / (MEMORY[1] - MEMORY[0])


def _y(thousands: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (thousands - SPEED[0]) / (SPEED[1] - SPEED[0])
