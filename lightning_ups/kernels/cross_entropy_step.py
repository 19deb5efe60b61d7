"""The step from logits to losses and the gradient of the logits, between the head's products.

`reference_step` is the specification, and `launch` one Triton kernel. That has one program per row. It reads the row
twice, the second time backwards, since the last part is still in the cache, and writes the gradient, possibly in place:
a block of it then replaces exactly the block of logits that the same threads have just read, each its own elements. The
logit of the target class, which one of the blocks overwrites, is read before all of them, with the barriers of the
reductions in between.
"""
# ruff: noqa: ANN001, ANN201, D103, N803, N806 (shape suffixes are capitals; Triton reads the annotations of a kernel)
# pyright: reportInvalidTypeForm=false

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import compiled, has, launching_on
from lightning_ups._compat.optional.packages import language as tl

BLOCK, WARPS, STAGES = 4096, 16, 3
# 8 for each thread: loads of 16 bytes in bfloat16. With fewer elements than a warp's threads, two warps would share
# elements, and one might read what the other has already overwritten.
ELEMENTS_PER_WARP = 256
ALIGNED = 16  # elements; Triton uses full vectors only up to a bound that it knows to be a multiple of this


class Settings(NamedTuple):
    """Additions to the cross-entropy.

    Args:
        z_loss: The factor of the squared log-sum-exp that is added.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: unchanged.
    """

    z_loss: float
    softcap: float


def reference_step(
    logits_CV: Tensor,
    gradient_CV: Tensor | None,
    targets_C: Tensor,
    per_row_C: Tensor,
    loss_C: Tensor,
    settings: Settings,
) -> None:
    """Write each row's loss into ``loss_C`` and, if needed, the gradient times ``per_row_C`` into ``gradient_CV``.

    A row whose factor is 0 is ignored: its loss and gradient are 0, whatever its target. The computation uses the dtype
    of ``loss_C``. The logits are overwritten, and ``gradient_CV`` may be the same tensor.
    """
    z_loss, softcap = settings
    x_CV = logits_CV.to(loss_C.dtype)
    if softcap:
        x_CV.div_(softcap).tanh_().mul_(softcap)
    lse_C = x_CV.logsumexp(-1)
    counted_C = per_row_C != 0
    at_C1 = torch.where(counted_C, targets_C, 0).unsqueeze(1)
    right_C = x_CV.gather(1, at_C1).squeeze(1)
    loss_C.copy_(torch.where(counted_C, lse_C - right_C + z_loss * lse_C.square(), 0.0))
    if gradient_CV is None:
        return
    factor_C = (1 + 2 * z_loss * lse_C) * per_row_C
    slope_CV = 1 - (x_CV / softcap).square() if softcap else None
    right_slope_C = 1 - (right_C / softcap).square() if softcap else 1.0
    x_CV.sub_(lse_C.unsqueeze(1)).exp_().mul_(factor_C.unsqueeze(1))
    if slope_CV is not None:
        x_CV.mul_(slope_CV)
    # The target class separately, in full precision: saves a pass over the logits compared with adding to them.
    right_gradient_C = ((right_C - lse_C).exp() * factor_C - per_row_C) * right_slope_C
    x_CV.scatter_(1, at_C1, right_gradient_C.unsqueeze(1))
    if x_CV is not gradient_CV:
        gradient_CV.copy_(x_CV)


def step_on(device: str, dtype: torch.dtype) -> Callable[..., None]:
    """Return the implementation for losses of ``dtype``: one kernel on a GPU, elsewhere `reference_step`."""
    return launch if device == "cuda" and dtype == torch.float32 and has("triton") else reference_step


def launch(
    logits_CV: Tensor,
    gradient_CV: Tensor | None,
    targets_C: Tensor,
    per_row_C: Tensor,
    loss_C: Tensor,
    settings: Settings,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Write loss and gradient, as specified by `reference_step`. Up to 15 elements after each row are overwritten."""
    num_rows, vocab = logits_CV.shape
    if not num_rows:
        return
    written = logits_CV if gradient_CV is None else gradient_CV
    width = min(_width(logits_CV), _width(written))
    block = min(block, 1 << max(width - 1, 1).bit_length())
    with launching_on(logits_CV.device):
        _kernel()[(num_rows,)](
            logits_CV,
            written,
            targets_C.contiguous(),  # a column of a table is not contiguous
            per_row_C.contiguous(),
            loss_C,
            vocab,
            width,
            logits_CV.stride(0),
            written.stride(0),
            settings.z_loss,
            settings.softcap,
            2 / settings.softcap if settings.softcap else 0.0,
            GRADIENT=gradient_CV is not None,
            SOFTCAP=bool(settings.softcap),
            BLOCK=block,
            BLOCKS=-(-width // block),
            STAGES=stages,
            num_warps=max(1, min(warps, block // ELEMENTS_PER_WARP)),
        )


def _width(matrix: Tensor) -> int:
    """Return the width up to which a row may be read and written: full vectors, if the matrix owns that memory."""
    rows, vocab = matrix.shape
    width = -(-vocab // ALIGNED) * ALIGNED
    end = matrix.storage_offset() + (rows - 1) * matrix.stride(0) + width
    fits = width <= matrix.stride(0) and end * matrix.element_size() <= matrix.untyped_storage().nbytes()
    return width if fits else vocab


@cache
def _kernel() -> Any:
    return compiled(
        cross_entropy_kernel,
        feature="cross-entropy's step in one kernel",
        # One compilation for all chunk starts in the batch.
        do_not_specialize_on_alignment=["targets", "per_row", "losses"],
    )


def cross_entropy_kernel(
    logits,
    gradients,
    targets,
    per_row,
    losses,
    vocab,
    width,
    logits_stride,
    gradients_stride,
    z_loss,
    softcap,
    double_rate,
    GRADIENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    gradients += row * gradients_stride
    factor = tl.load(per_row + row)
    if factor == 0:  # ignored
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for number in range(BLOCKS):
                at = number * BLOCK + tl.arange(0, BLOCK)
                tl.store(gradients + at, tl.zeros((BLOCK,), gradients.dtype.element_ty), mask=at < width)
    else:
        target = tl.load(targets + row)
        # An invalid class makes the loss NaN: a kernel cannot raise, and must not read out of bounds.
        known = (target >= 0) & (target < vocab)
        right = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
        # Each lane has its own maximum and sum. The initial value is finite, so that infinities are never subtracted.
        highest = tl.full((BLOCK,), -3.0e38, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for number in tl.range(0, BLOCKS, num_stages=STAGES):
            at = number * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if SOFTCAP:
                x = softcap * (1 - 2 / (tl.exp(x * double_rate) + 1))
            x = tl.where(at < vocab, x, -3.0e38)
            rise = x - highest
            less = tl.exp(-tl.abs(rise))
            total = tl.where(rise > 0, total * less + 1, total + less)
            highest = tl.maximum(highest, x)
        top = tl.max(highest, axis=0)
        beyond = tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
        lse = top + beyond  # nothing is subtracted from it: for large logits it has lost the last digits
        right_slope = 1.0
        if SOFTCAP:
            right_bent = 1 - 2 / (tl.exp(right * double_rate) + 1)
            right = softcap * right_bent
            right_slope = 1 - right_bent * right_bent
        tl.store(losses + row, (top - right) + beyond + z_loss * lse * lse)
        if GRADIENT:
            shrunk = (1 + 2 * z_loss * lse) * factor
            right_gradient = (tl.exp(right - top - beyond) * shrunk - factor) * right_slope
            for number in tl.range(0, BLOCKS, num_stages=STAGES):
                at = (BLOCKS - 1 - number) * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < width, other=0.0, eviction_policy="evict_first").to(tl.float32)
                if SOFTCAP:
                    bent = 1 - 2 / (tl.exp(x * double_rate) + 1)
                    gradient = tl.exp(softcap * bent - top - beyond) * shrunk * (1 - bent * bent)
                else:
                    gradient = tl.exp(x - top - beyond) * shrunk
                gradient = tl.where(at == target, right_gradient, gradient)
                tl.store(gradients + at, gradient.to(gradients.dtype.element_ty), mask=at < width)
