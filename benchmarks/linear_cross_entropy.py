"""A language model's head and loss on this GPU: time, peak memory and error, with and without all logits in memory.

    python benchmarks/linear_cross_entropy.py --out DIR [--budget 300]

For rows x dim x vocab of a Llama head, forward and backward of hidden states and weight in bfloat16: the usual way
(logits in bfloat16, loss in float32), eager and compiled, ours with several chunks and with logits in float32 or
rounded, and torch's own where this torch has it. "sums in bfloat16" does so with the weight's gradient, and another has
float32 logits of more rows at once: the function offers neither, and they show what its choices cost. Last comes the
kernel by itself, as it is tuned and otherwise: its bytes are what it must read and write at least.

Milliseconds are medians by CUDA events of rounds in which the ways take turns, after all that compiles has been
compiled; memory is what was allocated on top of the inputs at the highest, the error is that of the gradients against
float32 products. Each shape runs in a process of its own, and the kernel. What is known of a way is a line of JSON in
DIR/linear_cross_entropy.jsonl at once: first error and memory, then the same with times. It takes about two minutes;
what the budget has no time for is left out, and a later call with the same DIR goes on with the parts that lack times.
On a CPU all is tiny, so that the script can be tried.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from cases import environment
from processes import finished, portable
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_ups.kernels import linear_cross_entropy as module
from lightning_ups.kernels.cross_entropy_step import Settings, step_on
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy
from lightning_ups.kernels.weight_gradient import WeightGradient

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = ((16384, 2048, 128256), (16384, 4096, 128256), (32768, 768, 50304)) if ON_GPU else ((200, 16, 300),)
CHUNKS = (1024, 2048, 5504, 8192) if ON_GPU else (64,)  # besides auto, which is 4096 for all shapes on a GPU
TUNINGS = ((4096, 16, 3), (4096, 16, 1), (8192, 32, 3), (8192, 32, 1), (2048, 8, 1)) if ON_GPU else (None,)
STEPS = tuple((SHAPES[0][2], kind) for kind in ("rounded", "float32"))
ROUNDS = 6 if ON_GPU else 2
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def usual(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as training scripts write it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def ours(chunk: int | Literal["auto"], *, round_logits: bool = False) -> Loss:
    """Return our loss with some chunk."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, chunk=chunk, round_logits=round_logits)

    return loss


def altered(name: str, value: Any, *, round_logits: bool) -> Loss:
    """Return our loss with something in its module that the function does not offer."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            return linear_cross_entropy(hidden, weight, targets, round_logits=round_logits)
        finally:
            setattr(module, name, before)

    return loss


def summed_in_halves(weight: Tensor, _: torch.dtype, **__: bool) -> WeightGradient:
    """Return a sum of the weight's gradient over chunks in the weight's type."""
    return WeightGradient(weight, weight.dtype)


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return torch's own, in its accurate policy, whose logits are float32."""
    return linear_cross_entropy(hidden, weight, targets, backend="torch", round_logits=False)


def ways() -> dict[str, Loss]:
    """Return what is compared, by worth."""
    found: dict[str, Loss] = {"ours, auto": ours("auto"), "ours, auto, rounded": ours("auto", round_logits=True)}
    if ON_GPU:
        found["usual, compiled"] = torch.compile(usual, dynamic=False)
        found["ours, auto, compiled"] = torch.compile(ours("auto"), dynamic=False, fullgraph=True)
    found["usual, eager"] = usual
    for chunk in CHUNKS:
        found[f"ours, {chunk}"] = ours(chunk)
        found[f"ours, {chunk}, rounded"] = ours(chunk, round_logits=True)
    found["sums in bfloat16, auto, rounded"] = altered("WeightGradient", summed_in_halves, round_logits=True)
    found["1024 rows of float32 logits, auto"] = altered("_LEAST_LOGITS_ROWS", 1024, round_logits=False)
    if hasattr(F, "linear_cross_entropy"):
        found["torch's own"] = by_torch
    return found


def main() -> None:
    """Measure every way for every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", "--output", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")), dest="out"
    )
    parser.add_argument("--budget", type=float, default=300, help="seconds: what comes later is left out")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES) + 1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    log = options.out / "linear_cross_entropy.jsonl"
    if options.shape is not None:
        run_part(options.shape, log=log, end=time.monotonic() + options.budget)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "env.txt").write_text(environment())
    end = time.monotonic() + options.budget
    for number in range(len(SHAPES) + 1):
        run_in_a_process(number, options.out, log, left=end - time.monotonic())


def run_in_a_process(number: int, out: Path, log: Path, *, left: float) -> None:
    """Measure one shape, or after them the kernel by itself, and print what is known of it."""
    shape = SHAPES[number] if number < len(SHAPES) else None
    print("\nrows {} x dim {}, vocab {}".format(*shape) if shape else "\nthe kernel by itself", flush=True)
    if is_timed(shape, log):
        print("  is there", flush=True)
    elif left < (30 if ON_GPU else 0):
        print("  left out: the budget is spent", flush=True)
        return
    else:
        told = {"--shape": number, "--out": out, "--budget": max(left - 20, 1)}
        words = [str(word) for pair in told.items() for word in pair]
        said = finished([sys.executable, __file__, *words], timeout=left)
        with (out / "log.txt").open("a") as file:
            file.write(f"===== {shape or 'kernel'}\n{said}\n")
        if not is_timed(shape, log):
            print(f"  not to its end: {said.strip()[-600:]}", flush=True)
    for line in lines_of(shape, log):
        print(f"  {line['way']:32s} {table_row(line)}", flush=True)


def run_part(number: int, *, log: Path, end: float) -> None:
    """Write what is found of a shape, or of the kernel by itself."""
    if number < len(SHAPES):
        run_shape(SHAPES[number], log=log, end=end)
    else:
        run_steps(log=log, end=end)


def run_shape(shape: tuple[int, int, int], *, log: Path, end: float) -> None:
    """Write what is found of a shape, each line when it is known."""
    for name, found in measured(shape, end=end):
        line = {"way": name, **dict(zip(("rows", "dim", "vocab"), shape, strict=True)), "device": DEVICE, **found}
        with log.open("a") as file:
            file.write(portable(json.dumps(line)) + "\n")


def run_steps(*, log: Path, end: float) -> None:
    """Write the kernel's times, each when it is known."""
    for vocab, kind in STEPS:
        for tuning in TUNINGS:
            if time.monotonic() > end:
                return
            line = {"way": step_name(vocab, kind, tuning), "device": DEVICE}
            try:
                line |= measured_step(vocab, kind, tuning)
            except Exception as error:  # noqa: BLE001  (a tuning that fails is a result)
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            with log.open("a") as file:
                file.write(portable(json.dumps(line)) + "\n")


def step_name(vocab: int, kind: str, tuning: tuple[int, ...] | None) -> str:
    """Return what a line of the kernel is called."""
    return f"step {vocab} {kind} {'x'.join(map(str, tuning)) if tuning else 'eager'}"


def measured_step(vocab: int, kind: str, tuning: tuple[int, ...] | None) -> dict[str, float]:
    """Return the times of the kernel: rounded logits in place, or float32 ones whose gradient is elsewhere."""
    rows, dtype = (4096, torch.bfloat16) if kind == "rounded" else (512, torch.float32)
    rows = rows if ON_GPU else 20
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(rows, vocab, device=DEVICE, generator=generator).to(dtype)
    gradient = logits if kind == "rounded" else torch.empty_like(logits, dtype=torch.bfloat16)
    targets = torch.randint(0, vocab, (rows,), device=DEVICE, generator=generator)
    per_row, loss = torch.full((rows,), 1 / rows, device=DEVICE), torch.empty(rows, device=DEVICE)
    options = dict(zip(("block", "warps", "stages"), tuning or (), strict=False))

    def run() -> None:
        # Gradients become logits and are logits again: the values change, the work does not.
        step_on(DEVICE, torch.float32)(logits, gradient, targets, per_row, loss, Settings(0.0, 0.0), **options)

    run()
    times = [milliseconds(run) for _ in range(3 * ROUNDS)][ROUNDS:]
    nbytes = logits.nbytes + gradient.nbytes
    median = statistics.median(times)
    figures = {"milliseconds": median, "fastest": min(times), "slowest": max(times)}
    return {**figures, "rows": rows, "vocab": vocab, "gigabytes_per_second": nbytes / median / 1e6}


def lines_of(shape: tuple[int, int, int] | None, log: Path) -> list[dict[str, Any]]:
    """Return the last line of each way for a shape, or of the kernel; a line that was cut off does not count."""
    found: dict[str, dict[str, Any]] = {}
    for text in log.read_text().splitlines() if log.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        of = tuple(line[name] for name in ("rows", "dim", "vocab")) if "dim" in line else None
        if of == shape and line.get("device") == DEVICE:
            found[line["way"]] = line
    return list(found.values())


def is_timed(shape: tuple[int, int, int] | None, log: Path) -> bool:
    """Return whether a shape, or the kernel, was measured to its end: each way has times, or failed."""
    done = {line["way"] for line in lines_of(shape, log) if "milliseconds" in line or "error" in line}
    wanted = ways() if shape else {step_name(*step, tuning) for step in STEPS for tuning in TUNINGS}
    return done >= set(wanted)


def table_row(line: dict[str, Any]) -> str:
    """Return the line of the table."""
    if "gigabytes_per_second" in line:
        spread = f"({line['fastest']:.3f} to {line['slowest']:.3f})"
        return f"{line['milliseconds']:7.3f} ms {spread} {line['gigabytes_per_second']:6.0f} GB/s, {line['rows']} rows"
    if "milliseconds" not in line:
        return line.get("error") or f"no times  {line['peak_gib']:6.2f} GiB"
    return (
        f"{line['milliseconds']:7.2f} ms ({line['fastest']:.2f} to {line['slowest']:.2f}) {line['teraflops']:6.0f}"
        f" TFLOP/s  {line['peak_gib']:6.2f} GiB  loss {line['loss']:.5f}"
        f"  error hidden {line['error_hidden']:.1e} weight {line['error_weight']:.1e}"
    )


def measured(shape: tuple[int, int, int], *, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield memory and error of each way, then also its time; what fails says so, what comes too late is missing."""
    rows, dim, vocab = shape
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(rows, dim, device=DEVICE, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, dim, device=DEVICE, generator=generator) * dim**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=DEVICE, generator=generator)
    true = precise(hidden, weight, targets)

    def run(way: Loss) -> tuple[Tensor, ...]:
        loss = way(hidden, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    found: dict[str, dict[str, Any]] = {}
    able: dict[str, Callable[[], Any]] = {}
    for name, way in ways().items():
        if time.monotonic() > end:
            break
        try:
            run(way)  # which compiles: the first rows
            run(way)  # and, where the last rows are fewer, they
            found[name] = {**compare(run(way), true), **resources(lambda w=way: run(w))}
            able[name] = lambda w=way: run(w)
        except Exception as error:  # noqa: BLE001  (a way that fails is a result)
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        yield name, found[name]
    for name, times in timed(able).items():
        median = statistics.median(times)
        figures = {"milliseconds": median, "fastest": min(times), "slowest": max(times)}
        yield name, {**found[name], **figures, "teraflops": 6 * rows * dim * vocab / median / 1e9}


def precise(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and its gradients by float32 products."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    step = 4096  # rows at a time: float32 logits of all would not leave room
    total = torch.zeros((), device=DEVICE)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        loss = reference_linear_cross_entropy(leaves[0][part], leaves[1], targets[part], reduction="sum")
        (loss / len(targets)).backward()
        total += loss.detach() / len(targets)
    return total, *(leaf.grad for leaf in leaves if leaf.grad is not None)


def compare(found: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> dict[str, float]:
    """Return loss and errors of the gradients, relative to their lengths."""
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found[1:], true[1:], strict=True)]
    names = ("error_hidden", "error_weight")
    return {"loss": found[0].item(), "true_loss": true[0].item(), **dict(zip(names, errors, strict=True))}


def resources(run: Callable[[], Any]) -> dict[str, float]:
    """Return the highest memory on top of the inputs."""
    if not ON_GPU:
        return {"peak_gib": 0.0}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def timed(runs: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of each run; they take turns, so that clock and heat are alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run()  # without the memory that another one has left, this one's first asks for its own
            times[name].append(milliseconds(run))
    return times


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of ``run``."""
    if not ON_GPU:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


if __name__ == "__main__":
    main()
