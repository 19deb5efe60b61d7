"""A language model's head and loss on this GPU: time, peak memory and error, with and without all logits in memory.

    python benchmarks/linear_cross_entropy.py --out DIR [--budget 300]

For rows x dim x vocab of a Llama head, forward and backward of hidden states and weight in bfloat16: the usual way
(logits in bfloat16, loss in float32), eager and compiled, ours with several chunks, and torch's own where this torch
has it. Milliseconds are medians by CUDA events of rounds in which the ways take turns, after all that compiles has been
compiled; memory is what was allocated on top of the inputs at the highest, the error is that of the gradients against
float32 products. Each shape runs in a process of its own. What is known of a way is a line of JSON in
DIR/linear_cross_entropy.jsonl at once: first error and memory, then the same with times. It takes about two minutes for
three shapes; what the budget has no time for is left out, and a later call with the same DIR goes on with the shapes
that lack times. On a CPU all is tiny, so that the script can be tried.
"""

import argparse
import gc
import json
import os
import signal
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

from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = ((16384, 2048, 128256), (16384, 4096, 128256), (32768, 768, 50304)) if ON_GPU else ((200, 16, 300),)
CHUNKS: tuple[int | Literal["auto"], ...] = ("auto", 1024, 2048, 4096, 8192) if ON_GPU else ("auto", 64)
ROUNDS = 8 if ON_GPU else 2
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def usual(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as training scripts write it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def ours(chunk: int | Literal["auto"]) -> Loss:
    """Return our loss with some chunk."""
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, chunk=chunk)


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return torch's own, in its accurate policy."""
    return linear_cross_entropy(hidden, weight, targets, backend="torch")


def ways() -> dict[str, Loss]:
    """Return what is compared, by worth."""
    found: dict[str, Loss] = {"usual, eager": usual, "ours, chunk auto": ours("auto")}
    if ON_GPU:
        found["usual, compiled"] = torch.compile(usual, dynamic=False)
        found["ours, auto, compiled"] = torch.compile(ours("auto"), dynamic=False, fullgraph=True)
    if hasattr(F, "linear_cross_entropy"):
        found["torch's own"] = by_torch
    return found | {f"ours, chunk {chunk}": ours(chunk) for chunk in CHUNKS}


def main() -> None:
    """Measure every way for every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", "--output", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")), dest="out"
    )
    parser.add_argument("--budget", type=float, default=300, help="seconds: what comes later is left out")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help=argparse.SUPPRESS)
    options = parser.parse_args()
    log = options.out / "linear_cross_entropy.jsonl"
    if options.shape is not None:
        run_shape(SHAPES[options.shape], log=log, end=time.monotonic() + options.budget)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a shape ends too
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "env.txt").write_text(environment())
    end = time.monotonic() + options.budget
    for number, shape in enumerate(SHAPES):
        print("\nrows {} x dim {}, vocab {}".format(*shape), flush=True)
        left = end - time.monotonic()
        if is_timed(shape, log):
            print("  is there", flush=True)
        elif left < (30 if ON_GPU else 0):
            print("  left out: the budget is spent", flush=True)
            continue
        else:
            told = {"--shape": number, "--out": options.out, "--budget": max(left - 20, 1)}
            words = [str(word) for pair in told.items() for word in pair]
            said = finished([sys.executable, __file__, *words], timeout=left)
            with (options.out / "log.txt").open("a") as file:
                file.write(f"===== {shape}\n{said}\n")
            if not is_timed(shape, log):
                print(f"  not to its end: {said.strip()[-600:]}", flush=True)
        for line in lines_of(shape, log):
            print(f"  {line['way']:22s} {table_row(line)}", flush=True)


def run_shape(shape: tuple[int, int, int], *, log: Path, end: float) -> None:
    """Write what is found of a shape, each line when it is known."""
    for name, found in measured(shape, end=end):
        line = {"way": name, **dict(zip(("rows", "dim", "vocab"), shape, strict=True)), "device": DEVICE, **found}
        with log.open("a") as file:
            file.write(portable(json.dumps(line)) + "\n")


def lines_of(shape: tuple[int, int, int], log: Path) -> list[dict[str, Any]]:
    """Return the last line of each way for a shape; a line that was cut off does not count."""
    found: dict[str, dict[str, Any]] = {}
    for text in log.read_text().splitlines() if log.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if (line["rows"], line["dim"], line["vocab"]) == shape and line.get("device") == DEVICE:
            found[line["way"]] = line
    return list(found.values())


def is_timed(shape: tuple[int, int, int], log: Path) -> bool:
    """Return whether a shape was measured to its end: each way has times, or failed."""
    done = {line["way"] for line in lines_of(shape, log) if "milliseconds" in line or "error" in line}
    return done >= ways().keys()


def table_row(line: dict[str, Any]) -> str:
    """Return the line of the table."""
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
