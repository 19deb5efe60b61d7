"""The memory of a run by kind, as configured and with other settings, as ``plan`` predicts it.

`raw/memory.json` is the output of::

    python -m lightning_ups plan --preset h100 --gpu h100-80 --model GPTModule --model.size 150M --data RandomTokens
        --data.vocab_size 32000 --data.seq_len 2048 --data.batch_size 16 --json
"""

import json
from pathlib import Path

from pictures import svg

COLORS = {
    "activations": svg.BLUE,
    "temporaries": "#8c9eff",
    "optimizer state": svg.GREEN,
    "gradients": svg.AMBER,
    "parameters": svg.VIOLET,
    "other": svg.GREY,
}
LEFT, WIDE, TOP, HIGH, STEP, GIB = 270, 560, 92, 24, 38, 2**30


def draw() -> str:
    """Return the picture: a bar for each setting."""
    plan = json.loads((Path(__file__).parent / "raw/memory.json").read_text())
    rows = sorted(plan["settings"], key=lambda row: (row["name"] != "as configured", row["peak_bytes"]))
    most = max(row["peak_bytes"] for row in rows) / GIB
    shapes = [
        svg.text(20, 32, "Peak memory by kind, predicted by plan without a GPU", size=18, font_weight="600"),
        svg.text(20, 52, "a GPT of 150 M parameters, 16 sequences of 2048 tokens, compiled", size=13, fill=svg.SOFT),
    ]
    x = 20.0
    for kind, color in COLORS.items():
        shapes += [svg.box(x, 64, 11, 11, color, round=2), svg.text(x + 16, 74, kind, fill=svg.SOFT)]
        x += 38 + 7 * len(kind)
    for number, row in enumerate(rows):
        y, x = TOP + number * STEP, float(LEFT)
        shapes.append(svg.text(LEFT - 12, y + 17, row["name"], size=13, anchor="end"))
        kinds = dict.fromkeys(COLORS, 0.0)
        for kind, size in row["by_kind"].items():
            kinds[kind if kind in kinds else "other"] += size / GIB
        for kind, size in kinds.items():
            width = WIDE * size / most
            if width:
                shapes.append(svg.box(x, y, width, HIGH, COLORS[kind], title=f"{kind}: {size:.2f} GiB"))
            x += width
        shapes.append(svg.text(x + 8, y + 17, f"{row['peak_bytes'] / GIB:.1f} GiB", size=13))
    height = TOP + len(rows) * STEP + 10
    return svg.card(LEFT + WIDE + 90, height, shapes, label="Peak memory by kind with six settings")
