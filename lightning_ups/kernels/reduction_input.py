"""The input of a reduce-scatter: the gradients of a group, each split into a part per rank, in the reduction's dtype.

torch copies them together at less than half the memory bandwidth, while nothing else runs. Here one kernel per gradient
reads and writes full vectors.
"""
# ruff: noqa: ANN001, ANN201, D103, N803 (Triton reads the kernel's annotations, and it is no function of Python's)
# pyright: reportInvalidTypeForm=false

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import compiled, has, launching_on
from lightning_ups._compat.optional.packages import language as tl

CHUNK, BLOCK, WARPS = 16384, 4096, 8
TYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST = 2**20  # elements in all: below, torch's single kernel needs less host time


def put_together(gradients: Sequence[Tensor], out: Tensor, world_size: int) -> bool:
    """Write ``gradients`` into ``out`` as a reduction over ``world_size`` ranks reads them; return whether it could.

    It can if all are contiguous on a GPU with Triton, and each rank gets an equal number of whole rows.
    """
    if not (_can(gradients, out, world_size) and _compiles(out.device)):
        return False
    launch(gradients, out, world_size)
    return True


def _can(gradients: Sequence[Tensor], out: Tensor, world_size: int) -> bool:
    tensors = (*gradients, out)
    return (
        out.numel() >= LEAST
        and all(_is_plain(tensor) for tensor in tensors)
        and all(gradient.shape[0] % world_size == 0 for gradient in gradients)
        and out.numel() == sum(gradient.numel() for gradient in gradients)
    )


def _is_plain(tensor: Tensor) -> bool:
    on_gpu = tensor.device.type == "cuda" and has("triton")
    return on_gpu and type(tensor) is Tensor and tensor.dtype in TYPES and tensor.dim() > 0 and tensor.is_contiguous()


@cache
def _compiles(device: torch.device) -> bool:
    """Return whether the kernel can be compiled: Triton needs a C compiler, and torch does not."""
    try:
        launch([torch.zeros(32, device=device)], torch.empty(32, device=device), 1)
    except Exception as error:  # noqa: BLE001 (whatever a compiler and its driver raise)
        why = str(error) or type(error).__name__
        text = f"FSDP2's gradients are put together by torch, since Triton compiles nothing here: {why}"
        warnings.warn(text, stacklevel=2)
        return False
    return True


def launch(gradients: Sequence[Tensor], out: Tensor, world_size: int) -> None:
    """Do the same as `copy_together`, with one kernel per gradient."""
    rows, start = out.view(world_size, -1), 0
    with launching_on(out.device):
        for gradient in gradients:
            part = gradient.numel() // world_size
            if part:
                target = rows[:, start : start + part]
                grid = (-(-part // CHUNK), world_size)
                _kernel()[grid](gradient, target, part, rows.stride(0), CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS)
            start += part


@cache
def _kernel() -> Any:
    return compiled(part_kernel, feature="Putting gradients together")


def part_kernel(
    source,
    target,
    part,
    stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rank = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    source += rank * part
    target += rank * stride
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < part
        tl.store(target + at, tl.load(source + at, mask=inside).to(target.dtype.element_ty), mask=inside)
