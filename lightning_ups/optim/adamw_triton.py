"""AdamW's step over many tensors as one Triton kernel; `adamw_step.reference_step` is its specification.

The kernel finds its tensors in a table of addresses, and works through them chunk by chunk. The table is made anew only
when an address has changed, which with torch's caching allocator is seldom.
"""
# ruff: noqa: ANN001, ANN201, D103, N803 (Triton reads the kernel's annotations, and it is no function of Python's)
# pyright: reportInvalidTypeForm=false

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import compiled, launching_on
from lightning_ups._compat.optional.packages import language as tl
from lightning_ups.optim.adamw_step import Kind, Settings

CHUNK, BLOCK, WARPS = 16384, 2048, 8
TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class Launch:
    """One kernel over the slots of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._table = self._owners = self._places = torch.empty(0)
        self._addresses, self._sizes = list[Sequence[int]](), list[int]()

    def find(self, addresses: list[Sequence[int]], sizes: list[int]) -> None:
        """Take what lies at ``addresses``, columns of a `Layout`, and has ``sizes`` for what a step works on."""
        if addresses == self._addresses and sizes == self._sizes:
            return
        device = self._kind.device
        if sizes != self._sizes:
            self._plan(sizes, device)
        self._table = _sent(torch.tensor([*addresses, sizes]), device)
        self._addresses, self._sizes = addresses, sizes

    def __call__(self, settings: Settings, *, coefficient: Tensor | None, skip: Tensor | None = None) -> None:
        """Make one step, whose number is already in each slot's step."""
        kind = self._kind
        with launching_on(kind.device):
            _kernel()[(len(self._owners),)](
                self._table,
                len(self._sizes),
                self._owners,
                self._places,
                self._table if coefficient is None else coefficient,
                self._table if skip is None else skip,
                1 - settings.lr * settings.weight_decay,
                settings.lr,
                settings.beta2,
                1 - settings.beta1,
                1 - settings.beta2,
                math.log(settings.beta1) if settings.beta1 else -math.inf,
                math.log(settings.beta2) if settings.beta2 else -math.inf,
                settings.eps,
                GRADIENT=_type(kind.gradient),
                COPY=None if kind.copy is None else _type(kind.copy),
                SCALED=coefficient is not None,
                SKIPS=skip is not None,
                ALIGNED=kind.aligned,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )

    def _plan(self, sizes: Sequence[int], device: torch.device) -> None:
        chunks = torch.tensor([-(-size // CHUNK) for size in sizes])
        owners = torch.arange(len(sizes)).repeat_interleave(chunks)
        starts = chunks.cumsum(0) - chunks
        places = torch.arange(len(owners)) - starts[owners]
        self._owners, self._places = _sent(owners.int(), device), _sent(places.int(), device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    # From pinned memory nobody waits; torch's allocator of it keeps the block until the copy was made.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _type(dtype: torch.dtype) -> Any:
    _kernel()
    return getattr(tl, TYPES[dtype])


@cache
def _kernel() -> Any:
    return compiled(adamw_step_kernel, feature="AdamW's step in one kernel")


def adamw_step_kernel(
    table,
    count,
    owners,
    places,
    coefficient,
    skip,
    keep,
    lr,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    column = table + tl.load(owners + chunk)
    start = tl.load(places + chunk).to(tl.int64) * CHUNK
    size = tl.load(column + 6 * count)
    gradients = tl.load(column).to(tl.pointer_type(GRADIENT))
    weights = tl.load(column + count).to(tl.pointer_type(tl.float32))
    averages = tl.load(column + 2 * count).to(tl.pointer_type(tl.float32))
    squares = tl.load(column + 3 * count).to(tl.pointer_type(tl.float32))
    step = tl.load(tl.load(column + 4 * count).to(tl.pointer_type(tl.float32))).to(tl.float64)
    if SKIPS:
        size = size * (1 - tl.load(skip)).to(tl.int64)
    if ALIGNED:  # so that the masks let whole loads through
        size = tl.multiple_of(size, 8)
        gradients = tl.multiple_of(gradients, 16)
        weights = tl.multiple_of(weights, 16)
        averages = tl.multiple_of(averages, 16)
        squares = tl.multiple_of(squares, 16)
    correction1 = (1 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt(1 - tl.exp(step * log_beta2)).to(tl.float32)
    rate = lr / correction1
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            gradient = gradient * tl.load(coefficient)
        average = tl.load(averages + at, mask=inside, other=0.0)
        average = average + (gradient - average) * rest1
        square = tl.load(squares + at, mask=inside, other=0.0) * beta2 + rest2 * gradient * gradient
        weight = tl.load(weights + at, mask=inside, other=0.0) * keep
        weight = weight - rate * average / (tl.sqrt(square) / correction2 + eps)
        tl.store(averages + at, average, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(weights + at, weight, mask=inside)
        if COPY is not None:
            copies = tl.load(column + 5 * count).to(tl.pointer_type(COPY))
            if ALIGNED:
                copies = tl.multiple_of(copies, 16)
            tl.store(copies + at, weight.to(COPY), mask=inside)
