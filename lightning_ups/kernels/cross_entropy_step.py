"""The step from the logits of some rows to their losses and the gradient of the logits, between the head's products."""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import has

__all__ = ["Settings", "Step", "reference_step", "step_on"]


class Settings(NamedTuple):
    """Additions to the cross-entropy.

    Args:
        z_loss: The factor of the squared log-sum-exp that is added.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: unchanged.
    """

    z_loss: float
    softcap: float


class Step(Protocol):
    """An implementation of the step."""

    def __call__(
        self,
        logits_CV: Tensor,
        gradient_CV: Tensor | None,
        targets_C: Tensor,
        per_row_C: Tensor,
        loss_C: Tensor,
        settings: Settings,
    ) -> None:
        """Write loss and gradient, as specified by `reference_step`."""
        ...


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


def step_on(device: str, dtype: torch.dtype) -> Step:
    """Return the implementation for losses of ``dtype``: one kernel on a GPU, elsewhere `reference_step`."""
    if device == "cuda" and dtype == torch.float32 and has("triton"):
        from lightning_ups.kernels.cross_entropy_triton import launch

        return launch
    return reference_step
