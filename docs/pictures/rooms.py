"""The rooms of the package: a room imports from those below it only. They are read from pyproject.toml."""

import tomllib
from pathlib import Path

from pictures import svg

WHAT = {
    "cli": "the command line",
    "commands": "explain, plan, tune, diagnose, verify ...",
    "config": "YAML, presets, errors with file and line",
    "models": "reference models",
    "data": "datamodules",
    "callbacks": "when: in the loop",
    "strategies": "where parameters live",
    "precision": "in what dtype",
    "insight": "looks at a run and changes nothing: memory, throughput, reports",
    "order": "the one order of all changes, and what is refused",
    "state": "what a run keeps: checkpoints, resume",
    "transforms": "changes of an nn.Module: compile, recompute, shard, float8",
    "kernels": "fused operations",
    "optim": "optimizers",
    "_compat": "private names and versions of torch and Lightning",
}
WIDE, HIGH, GAP, TOP, LEFT = 640, 42, 8, 72, 20
LIGHTNING, PLAIN = "#eef0fb", "#e9f5ee"


def layers() -> list[list[str]]:
    """Return the rooms of each layer, from the top."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [
        [room.strip().removeprefix("lightning_ups.") for room in layer.split("|")] for layer in found if layer[0] != "("
    ]


def draw() -> str:
    """Return the picture: a row for each layer."""
    shapes = [
        svg.text(LEFT, 32, "The rooms", size=18, font_weight="600"),
        svg.text(
            LEFT,
            52,
            "a room imports from those below it only; green rooms work without Lightning",
            size=13,
            fill=svg.SOFT,
        ),
    ]
    y = TOP
    for rooms in layers():
        wide = (WIDE - GAP * (len(rooms) - 1)) / len(rooms)
        for number, room in enumerate(rooms):
            x = LEFT + number * (wide + GAP)
            plain = room in ("state", "transforms", "kernels", "optim")
            shapes.append(
                svg.box(
                    x, y, wide, HIGH, PLAIN if plain else LIGHTNING, round=6, stroke=svg.GREEN if plain else svg.BLUE
                )
            )
            if len(rooms) < 3:
                shapes += [
                    svg.text(x + 12, y + 26, room, size=14, font_weight="600"),
                    svg.text(x + 108, y + 26, WHAT[room], size=12.5, fill=svg.SOFT),
                ]
            else:
                shapes += [
                    svg.text(x + 12, y + 18, room, size=14, font_weight="600"),
                    svg.text(x + 12, y + 34, WHAT[room], size=12, fill=svg.SOFT),
                ]
        y += HIGH + GAP
    return svg.card(
        WIDE + 2 * LEFT, y + 14, shapes, label="The rooms: " + "; ".join(", ".join(rooms) for rooms in layers())
    )
