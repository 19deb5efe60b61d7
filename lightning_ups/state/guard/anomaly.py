"""Judges a step by its loss and gradient norm, on the device."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

__all__ = ["LossWatch", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The device's verdict on a step.

    Args:
        nonfinite: Whether the loss or the norm is NaN or infinite, on any rank.
        spike: Whether one of them is far above earlier values.
        loss: The loss, averaged over ranks.
        norm: The norm of the gradients; 0 if it is not watched.
        loss_limit: A larger loss is a spike; infinite while there are too few steps.
        norm_limit: The same for the norm.
    """

    nonfinite: bool
    spike: bool
    loss: float
    norm: float
    loss_limit: float
    norm_limit: float

    @classmethod
    def of(cls, values: list[float]) -> "Verdict":
        """Return the verdict that `LossWatch.judge` put into ``values``."""
        nonfinite, spike, *rest = values
        return cls(nonfinite > 0, spike > 0, *rest)

    def __str__(self) -> str:
        """Return the verdict in words."""
        parts = []
        for name, value, limit in (
            ("loss", self.loss, self.loss_limit),
            ("gradients' norm", self.norm, self.norm_limit),
        ):
            if not isfinite(value):
                parts.append(f"the {name} is {value}")
            elif value > limit:
                parts.append(f"the {name} is {value:.6g}, a spike above {limit:.6g}")
        return " and ".join(parts) or f"the loss is {self.loss:.6g}"


class LossWatch:
    """Keeps recent losses and norms on the device, and judges whether the next ones are far above them.

    A spike is more than ``sigmas`` standard deviations above the mean of the last ``window`` steps. For a spike the
    limit is stored instead of the value: one spike does not hide the next, and a loss that stays high becomes normal in
    time. The host reads no value.

    Args:
        device: The device of all tensors.
        window: The number of steps that are remembered.
        sigmas: The number of standard deviations that make a spike.
        least: The number of steps before anything counts as a spike.
    """

    def __init__(self, device: torch.device, *, window: int = 128, sigmas: float = 6.0, least: int = 32) -> None:
        self._last = torch.zeros(window, 2, device=device)
        self._seen = torch.zeros((), dtype=torch.long, device=device)  # number of finite values so far
        self._rows = torch.arange(window, device=device)
        self._sigmas, self._least = sigmas, least

    def judge(self, values: Tensor) -> Tensor:
        """Return a verdict on ``values`` [loss, norm], for `Verdict.of`, in float64 if ``values`` are."""
        dtype = torch.promote_types(values.dtype, self._last.dtype)
        self._last, values = self._last.to(dtype), values.to(dtype)
        window = self._rows.numel()
        there = (self._rows < self._seen).unsqueeze(1)
        count = self._seen.clamp(1, window)
        mean = self._last.sum(0) / count  # rows without a value are zero
        deviation = (((self._last - mean) * there).square().sum(0) / count).sqrt()
        # With a standard deviation of zero, as for a constant loss, rounding errors would be spikes.
        limit = mean + self._sigmas * torch.maximum(deviation, 1e-3 * mean.abs())
        limit = torch.where(self._seen >= self._least, limit, torch.inf)
        finite = values.isfinite().all()
        spike = (values > limit).any() & finite
        row = (self._seen % window).unsqueeze(0)  # a 1-D index: the host would read an index without dimensions
        kept = torch.where(finite, torch.minimum(values, limit), self._last.index_select(0, row).squeeze(0))
        self._last.index_copy_(0, row, kept.unsqueeze(0))
        self._seen += finite
        return torch.cat([torch.stack([~finite, spike]).to(dtype), values, limit])
