"""Where the milliseconds of a step go, each part beside what the hardware allows.

    python benchmarks/step_profile.py --row 1B-4 --output benchmarks/results/DATE_step_profile
    python benchmarks/step_profile.py --model vit --precision tensorwise --output benchmarks/results/DATE_step_profile

Runs our side of a row of llama.py, on one GPU or several, or a model of float8.py under torch's profiler for three
steps, and sorts the kernels by name. Times of a part are the sum of its kernels; parts overlap where several streams
work. `exposed communication` is the time in which nothing but communication runs, `idle` that in which nothing does. A
roofline is the part's operations or bytes over what was measured of this chip alone (H200: 787 TFLOP/s of bf16
products, 1285 of float8, 550 of attention, 4.25 TB/s); under the load of a whole step the clock is lower.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import float8
import torch
from cases import add_to, prepare, unloadable, unmet_gpus
from lightning.pytorch import Callback, Trainer
from llama import ALLOCATOR, SIDES, Row, Watch, rows, work
from processes import Interrupted, finished
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_ups.models.gpt import GPT, SIZES

STEPS = 3
PARTS: Mapping[str, str] = {
    "communication": r"nccl",
    "fused": r"^triton_(poi|red|per|mix)",  # by inductor, whose names list all that is in them
    "attention": r"flash|fmha|sdpa|attention|FlashAttn|mha",
    "products": r"gemm|nvjet|cutlass|cublas|_mm_|matmul|scaled_mm",
    "optimizer and clip": r"adamw|multi_tensor_apply|lpnorm|fused_adam",
    "copies": r"memcpy|memset|copy|CatArray|split_with_sizes|chunk_cat",
    "elementwise": r"elementwise|vectorized|reduce|softmax|norm|embedding|index",
}
PEAKS = {"products": 787e12, "float8": 1285e12, "attention": 550e12, "bytes": 4.25e12}

Span = tuple[float, float]


def part_of(kernel: str) -> str:
    """Return the part of a step that a kernel belongs to."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def spans_by_part(trace: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Return when, in milliseconds, the kernels of each part ran."""
    found: dict[str, list[Span]] = {}
    for event in trace:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, length = event["ts"] / 1e3, event["dur"] / 1e3
            found.setdefault(part_of(event["name"]), []).append((start, start + length))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of ``spans``."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def split(parts: Mapping[str, list[Span]], *, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step in each part, and those exposed and idle."""
    everything = [span for spans in parts.values() for span in spans]
    working = [span for part, spans in parts.items() if part != "communication" for span in spans]
    whole = max(stop for _, stop in everything) - min(start for start, _ in everything)
    found = {part: sum(stop - start for start, stop in spans) / steps for part, spans in parts.items()}
    found["exposed communication"] = (covered(everything) - covered(working)) / steps
    found["idle"] = (whole - covered(everything)) / steps
    found["step"] = whole / steps
    return found


def rooflines(row: Row) -> dict[str, float]:
    """Return the least milliseconds of those parts whose work is known."""
    config, tokens = SIZES[row.size], row.batch * row.seq
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in GPT(config).parameters())
    attention = 6 * config.num_layers * config.dim * row.seq * tokens * 3.5 / 3
    head = 6 * config.vocab_size * config.dim * tokens
    blocks = config.flops_per_token(0) * tokens - head
    low = PEAKS["float8"] if row.float8 else PEAKS["products"]
    head_peak = low if row.head else PEAKS["products"]
    gradient = 2 if row.gpus == 1 else 4  # bytes: sharded gradients are reduced in float32
    state = weights / row.gpus * (24 + 2 * gradient + (2 if row.gpus == 1 else 0))
    seconds = {
        "products": blocks / low + head / head_peak,
        "attention": attention / PEAKS["attention"],
        "optimizer and clip": state / PEAKS["bytes"],
    }
    return {part: 1e3 * value for part, value in seconds.items()}


def table(found: Mapping[str, float], least: Mapping[str, float]) -> str:
    """Return the parts, the largest first, as a table."""
    lines = ["| part | ms a step | share | roofline, ms | above it, ms |", "|---|---|---|---|---|"]
    for part, value in sorted(found.items(), key=lambda item: -item[1]):
        bound = least.get(part)
        beside = ("", "") if bound is None else (f"{bound:.1f}", f"{value - bound:.1f}")
        lines.append(f"| {part} | {value:.1f} | {value / found['step']:.1%} | {' | '.join(beside)} |")
    return "\n".join(lines)


class Profiled(Callback):
    """Lets torch's profiler run for STEPS steps after the warm-up."""

    def __init__(self, first: int, path: Path) -> None:
        self._first, self._path = first, path
        self._profile = profile(activities=[ProfilerActivity.CUDA])  # the host's own events would slow the host down

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._first:
            torch.cuda.synchronize()
            self._profile.start()
        if trainer.global_step == self._first + STEPS:
            torch.cuda.synchronize()
            self._profile.stop()
            if trainer.is_global_zero:
                self._profile.export_chrome_trace(str(self._path))
            trainer.should_stop = True


def traced_row(row: Row, path: Path) -> None:
    """Train our side of a row, and keep a trace of it."""
    added = Profiled(row.warmup, path)
    begin = Watch.on_train_batch_start

    def on_train_batch_start(self: Watch, *arguments: Any, **named: Any) -> None:
        added.on_train_batch_start(*arguments, **named)
        begin(self, *arguments, **named)

    Watch.on_train_batch_start = on_train_batch_start  # type: ignore[method-assign]
    work(SIDES["ours"], row)


def traced(command: list[str], output: Path, *, name: str, budget: float, ranks: int) -> list[dict[str, Any]]:
    """Return the events of a trace that ``command`` makes in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            said = finished([*command, "--trace", str(path)], timeout=budget, ranks=ranks, environment=ALLOCATOR)
        except Interrupted as error:
            add_to(output / "log.txt", f"===== {name}, interrupted\n{error.said}\n")
            raise
        add_to(output / "log.txt", f"===== {name}\n{said}\n")
        if not path.exists():
            sys.exit(f"no trace was made:\n{said[-3000:]}")
        return json.loads(path.read_text())["traceEvents"]


def main() -> None:
    """Profile one row or model and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--row", choices=rows(), help="of llama.py")
    what.add_argument("--model", choices=float8.MODELS, help="of float8.py")
    parser.add_argument("--precision", default="bf16", help="as float8.py names it; for --model")
    parser.add_argument("--output", type=Path, default=Path("runs/step_profile"))
    parser.add_argument("--budget", type=float, default=300, help="seconds")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    row = rows()[options.row] if options.row else None
    if options.trace:
        if row is not None:
            traced_row(row, options.trace)
        else:
            callback = Profiled(5, options.trace)
            float8.profile(options.model, options.precision, tiny=options.tiny, callback=callback)
        return
    name = options.row or f"{options.model}_{options.precision}"
    ranks = row.gpus if row is not None else 1
    size = row.size if row is not None else ""
    if lacks := unmet_gpus(ranks, what=name if row is None else f"row {name}", size=size):
        parser.error(lacks)
    in_float8 = row.float8 if row is not None else options.precision != "bf16"
    if in_float8 and (lacks := unloadable("torchao.float8", what=name if row is None else f"row {name}")):
        parser.error(lacks)
    prepare(parser, options.output)
    words = ["--row", options.row] if options.row else ["--model", options.model, "--precision", options.precision]
    words += ["--tiny"] if options.tiny else []
    command = [sys.executable, __file__, *words]
    trace = traced(command, options.output, name=name, budget=options.budget, ranks=ranks)
    report(name, trace, rooflines(row) if row is not None else {}, options.output)


def report(name: str, trace: list[dict[str, Any]], least: Mapping[str, float], output: Path) -> None:
    """Print where the milliseconds of a trace go, and keep it."""
    found = split(spans_by_part(trace), steps=STEPS)
    print(table(found, least))
    slowest: dict[str, list[float]] = {}
    for event in trace:
        if event.get("cat") == "kernel":
            slowest.setdefault(event["name"][:120], []).append(event["dur"] / 1e3 / STEPS)
    kernels = sorted(((sum(times), len(times) // STEPS, kernel) for kernel, times in slowest.items()), reverse=True)
    kept = {"row": name, "ms": found, "roofline_ms": least, "kernels": kernels[:80]}
    (output / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    (output / f"{name}.md").write_text(table(found, least) + "\n")
    with gzip.open(output / f"{name}.trace.json.gz", "wt") as file:
        json.dump([event for event in trace if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")], file)
    for time, count, kernel in kernels[:15]:
        print(f"{time:8.2f} ms in {count:4d}  {part_of(kernel):20s} {kernel}")


if __name__ == "__main__":
    main()
