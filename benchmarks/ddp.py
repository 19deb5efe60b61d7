r"""`PDEModule` on one and two GPUs: stock DDP, tuned DDP and FSDP2, at the same batch on each GPU.

    python benchmarks/ddp.py --budget 540 --output benchmarks/results/DATE_ddp     # again until nothing is left

A case is "SHAPE, WAY, STRATEGY ROUND". Shapes are those of `pde.py`. Ways: `graphs` compiles the model and replays CUDA
graphs, `compiled` compiles it, `eager` is stock Lightning's `bf16-mixed`, and `preset` is `preset: h100`. `one` is one
GPU. Each case is a process of its own (two ranks: two). Rounds alternate; the shapes and strategies that tell most come
first. What the folder has is left out. The last line is JSON: for each shape, way and strategy the median step time,
the speedup over one GPU in samples a second, and the scaling efficiency, which is half of it. On a CPU all is tiny,
over gloo.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases import by_kind, earlier, main
from pde import load
from zoo_modules import LINES
from zoo_run import Side, preset, run

from lightning_ups.callbacks import Compile
from lightning_ups.strategies import FSDP2Strategy, TunedDDPStrategy

ON_GPU = torch.cuda.is_available()
SHAPES = ("10M_b4", "30M_b24", "30M_b4", "10M_b24")
ROUNDS = 2
ONE_BUCKET = 4096.0  # MiB
STRATEGIES: Mapping[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "tuned_ddp": TunedDDPStrategy,
    "ddp": lambda: "ddp",
    "tuned_ddp in one bucket": lambda: TunedDDPStrategy(bucket_mb=ONE_BUCKET),
    "tuned_ddp, sharded state": lambda: TunedDDPStrategy(shard_optimizer_state=True),
    "tuned_ddp, bf16": lambda: TunedDDPStrategy(compression="bf16"),
    "fsdp2": FSDP2Strategy,
}
DDP = ("one", "tuned_ddp", "ddp")
WAYS: Mapping[str, tuple[str, ...]] = {
    "graphs": (*DDP, "tuned_ddp in one bucket"),
    "compiled": (*DDP, "tuned_ddp in one bucket", "tuned_ddp, sharded state", "tuned_ddp, bf16"),
    "eager": DDP,
    "preset": ("one", "fsdp2"),
}


def settings(way: str, strategy: str) -> dict[str, Any]:
    """Return arguments of the Trainer."""
    chosen = {"strategy": STRATEGIES[strategy]()}
    if way == "eager":
        return {"precision": "bf16-mixed", **chosen}
    made = preset()
    if way != "preset" or not ON_GPU:
        others = [callback for callback in made["callbacks"] if not isinstance(callback, Compile)]
        mode = "reduce-overhead" if way == "graphs" else "default"
        made["callbacks"] = [*others, *([Compile(scope="model", mode=mode)] if ON_GPU else [])]
    return {**made, **chosen}


def measured(shape: str, way: str, strategy: str) -> dict[str, Any]:
    """Train, and return the time of a step and the losses."""
    side = Side(partial(settings, way, strategy), ranks=1 if strategy == "one" else 2)
    found = run(LINES[shape], side, tiny=not ON_GPU, limit=240, blocks=(6, 0.5) if ON_GPU else (2, 0.0))
    keys = ("step_ms", "blocks_ms", "block_steps", "peak_gib", "busy", "first_step_s", "losses", "error", "card")
    return {key: found[key] for key in keys if found.get(key) is not None}


def made() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return all cases, the most telling kinds first, each of them in rounds."""
    load()
    kinds = [(shape, way, strategy) for shape in SHAPES for way, several in WAYS.items() for strategy in several]
    first = [kind for kind in kinds if kind[0] in SHAPES[:2] and kind[1] in ("graphs", "compiled") and kind[2] in DDP]
    parts = [first, [kind for kind in kinds if kind not in first]]
    return {
        f"{', '.join(kind)} {turn}": partial(measured, *kind)
        for part in parts
        for turn in range(1, ROUNDS + 1)
        for kind in part
    }


def left(cases: Mapping[str, Any], words: list[str]) -> dict[str, Any]:
    """Return the cases that the folder of ``--output`` does not have yet; all of them in a case's own process."""
    if "--case" in words or "--cases" in words or "--output" not in words[:-1]:
        return {**cases}
    done = {
        one["case"] for one in earlier(Path(words[words.index("--output") + 1]) / "result.json") if "step_ms" in one
    }
    return {name: case for name, case in cases.items() if name not in done}


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds, and how they compare with one GPU."""
    times = {kind: found for kind, found in by_kind(results, "step_ms").items() if found}
    rows: dict[str, Any] = {}
    for kind, found in times.items():
        shape, way, strategy = kind.split(", ", 2)
        rows[kind] = {"step_ms": median(found), "rounds": len(found)}
        if strategy != "one" and (alone := times.get(f"{shape}, {way}, one")):
            efficiency = median(alone) / median(found)
            rows[kind] |= {"speedup": round(2 * efficiency, 3), "efficiency": round(efficiency, 3)}
    return rows


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    wanted = left(made(), sys.argv)
    results = main(wanted, columns=("step_ms", "peak_gib", "busy", "first_step_s"), timeout_s=240) if wanted else []
    if "--case" not in sys.argv:
        folder = Path(sys.argv[sys.argv.index("--output") + 1]) if "--output" in sys.argv[:-1] else None
        found = summary(earlier(folder / "result.json") if folder else results)
        print(json.dumps(found))
        if folder:
            (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
