"""A language model's head and loss on this GPU: time, peak memory and error, with and without all logits in memory.

    python benchmarks/linear_cross_entropy.py --out DIR

For rows x dim x vocab of a Llama head, forward and backward of hidden states and weight in bfloat16: the usual way
(logits in bfloat16, loss in float32), eager and compiled, ours with several chunks, and torch's own where this torch
has it. Milliseconds are medians by CUDA events, memory is what was allocated on top of the inputs at the highest, the
error is that of the gradients against float32 products. Each line is JSON in DIR/linear_cross_entropy.jsonl; a table
follows. It takes about two minutes.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy

SHAPES = ((16384, 2048, 128256), (16384, 4096, 128256), (32768, 768, 50304))
CHUNKS: tuple[int | Literal["auto"], ...] = ("auto", 1024, 2048, 4096, 8192)
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


def main() -> None:
    """Measure every way for every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ways: dict[str, Loss] = {"usual, eager": usual, "usual, compiled": torch.compile(usual, dynamic=False)}
    ways |= {f"ours, chunk {chunk}": ours(chunk) for chunk in CHUNKS}
    ways["ours, auto, compiled"] = torch.compile(ours("auto"), dynamic=False, fullgraph=True)
    if hasattr(F, "linear_cross_entropy"):
        ways["torch's own"] = by_torch
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": version("torch")}))
    with (options.out / "linear_cross_entropy.jsonl").open("w") as log:
        for shape in SHAPES:
            print("\nrows {} x dim {}, vocab {}".format(*shape))
            for name, way in ways.items():
                line = {"way": name, "rows": shape[0], "dim": shape[1], "vocab": shape[2], **measure(way, *shape)}
                log.write(json.dumps(line) + "\n")
                print(f"  {name:22s} {told(line)}", flush=True)


def told(line: dict[str, Any]) -> str:
    """Return the line of the table."""
    if "error" in line:
        return line["error"]
    return (
        f"{line['milliseconds']:7.2f} ms {line['teraflops']:6.0f} TFLOP/s  {line['peak_gib']:6.2f} GiB"
        f"  loss {line['loss']:.5f}  error hidden {line['error_hidden']:.1e} weight {line['error_weight']:.1e}"
    )


def measure(way: Loss, rows: int, dim: int, vocab: int) -> dict[str, Any]:
    """Return time, memory and error of one way."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, dim, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, dim, device="cuda", generator=generator) * dim**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)

    def run() -> tuple[Tensor, ...]:
        loss = way(hidden, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    try:
        for _ in range(2):
            run()
        found = run()
        errors = compare(found, hidden, weight, targets)
        del found
        return {**errors, **resources(run), "teraflops": 0.0} | speed(run, 6 * rows * dim * vocab)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def compare(found: tuple[Tensor, ...], hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """Return loss and errors of the gradients, for the first rows and the weight as a whole."""
    precise = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    step = 4096  # rows at a time: float32 logits of all would not leave room
    total = torch.zeros((), device="cuda")
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        loss = reference_linear_cross_entropy(precise[0][part], precise[1], targets[part], reduction="sum")
        (loss / len(targets)).backward()
        total += loss.detach() / len(targets)
    names = ("error_hidden", "error_weight")
    errors = {
        name: ((grad.float() - tensor.grad).norm() / tensor.grad.norm()).item()
        for name, grad, tensor in zip(names, found[1:], precise, strict=True)
        if tensor.grad is not None
    }
    return {"loss": found[0].item(), "true_loss": total.item(), **errors}


def resources(run: Callable[[], Any]) -> dict[str, float]:
    """Return the highest memory on top of the inputs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def speed(run: Callable[[], Any], operations: int) -> dict[str, float]:
    """Return the median milliseconds, and what they mean for three products."""
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    milliseconds = statistics.median(times)
    return {"milliseconds": milliseconds, "teraflops": operations / milliseconds / 1e9}


if __name__ == "__main__":
    main()
