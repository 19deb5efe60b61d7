"""The one order of all changes to a model, as a pipeline; the stages are those of the package."""

from pictures import svg

from lightning_ups.order import Stage

WHAT = {  # what a stage does, and what asks for it
    "CONVERT": ("swap layers, cast", "Float8Precision, TEPrecision"),
    "TENSOR_PARALLEL": ("split large layers", "tensor_parallel_size"),
    "RECOMPUTE": ("save less for backward", "ActivationCheckpoint"),
    "COMPILE": ("compile blocks", "Compile"),
    "OFFLOAD": ("activations to the host", "ActivationOffload"),
    "SHARD": ("split parameters", "fsdp2, simple_fsdp"),
    "MATERIALISE": ("give shards memory", "strategy"),
    "OPTIMIZERS": ("wrap optimizers", "OptimizerOffload, precision"),
}
WIDE, HIGH, STEP, TOP = 196, 74, 232, 72


def draw() -> str:
    """Return the picture: two rows of four stages."""
    shapes = [
        svg.text(20, 32, "The one order of all changes", size=18, font_weight="600"),
        svg.text(20, 52, "in whatever order you list callbacks, precision and strategy", size=13, fill=svg.SOFT),
    ]
    for number, stage in enumerate(Stage):
        what, who = WHAT[stage.name]
        x, y = 20 + number % 4 * STEP, TOP + number // 4 * (HIGH + 36)
        shapes += [
            svg.box(x, y, WIDE, HIGH, "#eef0fb", round=8, stroke=svg.BLUE),
            svg.text(
                x + 12, y + 23, f"{number + 1}  {stage.name.replace('_', ' ').lower()}", size=14, font_weight="600"
            ),
            svg.text(x + 12, y + 43, what, size=13),
            svg.text(x + 12, y + 61, who, size=12, fill=svg.SOFT),
        ]
        middle = y + HIGH / 2
        if number % 4 < 3:
            shapes += [_arrow(x + WIDE + 5, middle, x + STEP - 6, middle)]
        elif number < len(Stage) - 1:
            turn = y + HIGH + 18
            path = f"M{x + WIDE / 2} {y + HIGH} V{turn} H{20 + WIDE / 2} V{turn + 12}"
            shapes += [
                f'<path d="{path}" fill="none" stroke="{svg.SOFT}" stroke-width="1.5"/>',
                _head(20 + WIDE / 2, turn + 18, down=True),
            ]
    height = TOP + 2 * HIGH + 36 + 20
    return svg.card(
        20 + 3 * STEP + WIDE + 20,
        height,
        shapes,
        label="The stages: " + ", ".join(stage.name.lower() for stage in Stage),
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return svg.line(x1, y1, x2 - 6, y2, svg.SOFT, width=1.5) + _head(x2, y2)


def _head(x: float, y: float, *, down: bool = False) -> str:
    points = f"{x},{y} {x - 5},{y - 8} {x + 5},{y - 8}" if down else f"{x},{y} {x - 8},{y - 5} {x - 8},{y + 5}"
    return f'<polygon points="{points}" fill="{svg.SOFT}"/>'
