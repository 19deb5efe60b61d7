"""AdamW's step over master weights on this GPU: in one kernel, and by torch's fused step with casts around it.

    python benchmarks/adamw_step.py --output benchmarks/results/DATE_adamw_step

A step here is what `MasteredOptimizer.step` does with bfloat16 gradients and a clip coefficient: cast, multiply, AdamW,
and the bfloat16 copy. `one kernel` makes it in one pass of 28 bytes a weight, with several sizes of its chunks and
blocks; `torch` in 48. The weights are those of the 1.5 B GPT, or of the quickstart's (37 small tensors, where the time
is the host's). Milliseconds are of 40 steps between two CUDA events, after warm-up; `difference` is the largest one
between the two ways' weights after 5 equal steps, in units of the learning rate.

Without a GPU the tiny cases run by the specification, which tries the script out.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from cases import main
from torch import nn

from lightning_ups.models.gpt import GPT, SIZES, Size
from lightning_ups.optim import MasteredOptimizer, MasterWeights

STEPS = 40 if torch.cuda.is_available() else 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR = 1e-3
SHAPES = ((16384, 2048, 8), (4096, 2048, 8), (16384, 1024, 4), (16384, 1024, 8), (16384, 4096, 8), (16384, 4096, 16))


class Plain(torch.optim.AdamW):
    """AdamW by another name, which the one kernel leaves alone."""


def prepared(size: Size, *, one_kernel: bool) -> tuple[nn.Module, MasteredOptimizer]:
    """Return the model with its masters, and the optimizer over them."""
    with torch.device("meta"):
        model = GPT(SIZES[size])
    model.to_empty(device=DEVICE)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    kind = torch.optim.AdamW if one_kernel else Plain
    inner = kind(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return model, MasteredOptimizer(inner, MasterWeights(model, dtype=torch.bfloat16))


def give_gradients(model: nn.Module, *, seed: int) -> None:
    """Give each parameter a gradient of its type."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)


def stepped(model: nn.Module, optimizer: MasteredOptimizer, *, steps: int, seed: int | None = None) -> None:
    """Make ``steps``; the same gradients again and again unless there is a ``seed`` for fresh ones."""
    coefficient = torch.full((), 0.5, device=DEVICE)
    gradients = [parameter.grad for parameter in model.parameters()]
    for step in range(steps):
        if seed is not None:
            give_gradients(model, seed=seed + step)
        else:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        optimizer.take_clip_coefficient(coefficient)
        optimizer.step()


def timed(size: Size, *, shape: tuple[int, int, int] | None) -> dict[str, Any]:
    """Time the step, in one kernel of ``shape`` (chunk, block, warps) or by torch."""
    if shape is not None and DEVICE == "cuda":
        from lightning_ups.optim import adamw_triton

        adamw_triton.CHUNK, adamw_triton.BLOCK, adamw_triton.WARPS = shape
    model, optimizer = prepared(size, one_kernel=shape is not None)
    give_gradients(model, seed=1)
    weights = sum(parameter.numel() for parameter in model.parameters())
    start, seconds = time.perf_counter(), 0.0
    if DEVICE == "cuda":
        stepped(model, optimizer, steps=3)
        give_gradients(model, seed=2)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        events[0].record()
        stepped(model, optimizer, steps=STEPS)
        events[1].record()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        milliseconds = events[0].elapsed_time(events[1]) / STEPS
    else:
        stepped(model, optimizer, steps=STEPS)
        milliseconds = (time.perf_counter() - start) / STEPS * 1e3
    return {
        "size": size,
        "shape": shape,
        "step_ms": round(milliseconds, 4),
        "host_ms": round(seconds / STEPS * 1e3, 4),
        "TB_s": round(weights * (28 if shape else 48) / milliseconds / 1e9, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else None,
        "steps": STEPS,
    }


def compared(size: Size) -> dict[str, Any]:
    """Return how far the two ways come apart in 5 equal steps."""
    ends = []
    for one_kernel in (True, False):
        model, optimizer = prepared(size, one_kernel=one_kernel)
        stepped(model, optimizer, steps=5, seed=7)
        ends.append([master.detach() for master in optimizer.masters.of.values()])
    error = max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
    return {"size": size, "difference": error / LR}


TIMED: tuple[Size, ...] = ("tiny", "1B") if DEVICE == "cuda" else ("tiny",)
KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    f"{size} {name}": partial(timed, size, shape=shape)
    for size in TIMED
    for name, shape in [("torch", None), *((f"one kernel {s}", s) for s in (SHAPES if size == "1B" else SHAPES[:1]))]
}

if __name__ == "__main__":
    columns = ("step_ms", "host_ms", "TB_s", "peak_gib", "difference")
    main({**KINDS, "compared": lambda: compared("tiny")}, columns=columns)
