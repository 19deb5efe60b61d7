"""What the benchmark of unmodified modules measured, and a table of it for each GPU, from raw output.

``PYTHONPATH=docs python -m zoo_results`` writes the tables into three pages of ``docs/results``.
"""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
LEFT_OUT = "2026-11-28_zoo_tenth/whole_step.jsonl"  # of code that did not stay
GPUS = ("H100", "H200")
FAMILIES = {  # as they are shown
    "Lightning's demos": "Lightning demos",
    "convolutional": "convolutions",
    "decoder": "decoders",
    "encoder": "encoders",
    "encoder-decoder": "image-text, seq2seq",
    "equation": "operators, equations",
    "graph": "graph networks",
    "image and text": "image-text, seq2seq",
    "mixture of experts": "mixtures of experts",
    "operator": "operators, equations",
    "segmentation and detection": "segmentation, boxes",
    "series": "Mamba, PatchTST",
    "state space": "Mamba, PatchTST",
    "vision transformer": "vision transformers",
    "ways to train": "GAN, EMA, LoRA ...",
}
HEADS = ["module", "stock, ms", "compiled, ms", "preset, ms", "gain over stock", "over compiled", "GiB, both", "raw"]
MARK = "<!-- Below: written by `PYTHONPATH=docs python -m zoo_results`. -->\n"

Record = dict[str, Any]
Calls = dict[str, dict[str, list[Record]]]  # by call and side


def timed() -> dict[str, Calls]:
    """Return the runs that were timed, by module."""
    found: dict[str, Calls] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(set(RESULTS.glob("**/*zoo*/*.jsonl")) - {RESULTS / LEFT_OUT}):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["kind"] == "run" and not record["tiny"] and "step_ms" in record:
                found[record["line"]][record["call"]][record["side"]].append(record | {"folder": path.parent.name})
    return found


def last(calls: Calls, *sides: str) -> dict[str, list[Record]] | None:
    """Return the runs of the last call that has all ``sides``."""
    return max(((call, runs) for call, runs in calls.items() if {*sides} <= {*runs}), default=("", None))[1]


def step_ms(runs: list[Record]) -> float:
    """Return the step time of one side: the mean over rounds of the median."""
    return statistics.fmean(statistics.median(run["blocks_ms"]) for run in runs)


def table(gpu: str) -> str:
    """Return a row for each module whose last call with both stock Lightning and the preset was on ``gpu``."""
    rows, folders, ratios = defaultdict(list), set(), []
    for name, calls in timed().items():
        runs = last(calls, "stock", "preset")
        if runs is None or gpu not in runs["preset"][-1]["card"]:
            continue
        stock, preset = step_ms(runs["stock"]), step_ms(runs["preset"])
        compiled = step_ms(runs["stock_compile"]) if "stock_compile" in runs else None
        pair = runs if compiled else last(calls, "stock_compile", "preset")
        over = step_ms(pair["stock_compile"]) / step_ms(pair["preset"]) if pair else None
        gib = ", ".join(f"{runs[side][-1]['peak_gib']:.2f}" for side in ("stock", "preset"))
        folder = runs["preset"][-1]["folder"]
        folders.add(folder)
        ratios.append(stock / preset)
        family = FAMILIES.get(runs["stock"][0]["family"], runs["stock"][0]["family"])
        times = [f"{value:.3g}" if value else "" for value in (stock, compiled, preset)]
        gains = [f"{value:.2f}x" if value else "" for value in (stock / preset, over)]
        rows[family].append([name, *times, *gains, gib, f"[{_part(folder)}]"])
    found = [row for family in sorted(rows) for row in ([f"**{family}**", *[""] * 7], *sorted(rows[family]))]
    shown = [column for column in range(len(HEADS)) if any(row[column] for row in found)]
    lines = [
        f"{len(ratios)} modules; the median runs {statistics.median(ratios):.2f} times as fast as with stock.\n",
        *(f"| {' | '.join(row[column] for column in shown)} |" for row in [HEADS, ["---"] * len(HEADS), *found]),
        "",
        *(f"[{_part(folder)}]: ../../benchmarks/results/{folder}/README.md" for folder in sorted(folders)),
    ]
    return "\n".join(lines) + "\n"


def speedups() -> dict[str, tuple[str, float]]:
    """Return the family and the speed-up of each module, from the last call that trained both sides."""
    found = {}
    for name, calls in timed().items():
        if runs := last(calls, "stock", "preset"):
            family = runs["stock"][0]["family"]
            found[name] = FAMILIES.get(family, family), step_ms(runs["stock"]) / step_ms(runs["preset"])
    return found


def families() -> str:
    """Return a row for each family: its geometric mean."""
    ratios = defaultdict(list)
    for family, ratio in speedups().values():
        ratios[family].append(ratio)
    means = sorted(
        ((statistics.geometric_mean(each), len(each), family) for family, each in ratios.items()), reverse=True
    )
    rows = [f"| {family} ({number}) | {mean:.2f}x |" for mean, number, family in means]
    return "\n".join(["| family (modules) | mean speed-up |", "|---|---|", *rows]) + "\n"


def summary() -> str:
    """Return the page of all GPUs with the table of families."""
    text = (ROOT / "docs/results/measured.md").read_text()
    return re.sub(r"^\| family \(modules\).*?\n\n", families() + "\n", text, flags=re.MULTILINE | re.DOTALL)


def page(gpu: str) -> str:
    """Return the page of ``gpu`` with its table."""
    return _path(gpu).read_text().partition(MARK)[0] + MARK + "\n" + table(gpu)


def _path(gpu: str) -> Path:
    return ROOT / "docs/results" / f"{gpu.lower()}.md"


def _part(folder: str) -> str:
    return folder.rpartition("_")[2]


if __name__ == "__main__":
    for gpu in GPUS:
        _path(gpu).write_text(page(gpu))
    (ROOT / "docs/results/measured.md").write_text(summary())
