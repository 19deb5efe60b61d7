"""Errors of predicted fields: nRMSE, the error by bands of the spectrum, and how long a rollout correlates.

Fields are [batch, channels, *grid]. Everything is computed on the device of the fields, in float32; nothing waits for a
GPU before ``compute``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

_TINY = 1e-8  # a field of zeros has no relative error


def nrmse(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the normalized root-mean-square error, the mean over samples and channels.

    The error of each sample and channel is the norm of the difference divided by the norm of the target.
    """
    return _nrmse_of_each(prediction, target).mean()


def spectral_error(prediction: Tensor, target: Tensor, *, edges: Sequence[float] = (4, 12)) -> Tensor:
    """Return the error in each band of wavenumbers, relative to the norm of the target [len(edges) + 1].

    The first band has the wavenumbers up to ``edges[0]``, counted in waves along an axis, and the last those beyond the
    last edge. For a single sample and channel the squares of all bands add up to the square of `nrmse`.
    """
    return _bands_of_each(prediction, target, edges=edges).mean(dim=(0, 1))


def correlation_time(prediction: Tensor, target: Tensor, *, threshold: float = 0.8, interval: float = 1.0) -> Tensor:
    """Return how long predictions correlate with targets, for each sample [batch].

    Args:
        prediction: A rollout [batch, time, channels, *grid].
        target: The same of the solution.
        threshold: The least correlation, over channels and grid.
        interval: Between frames.

    Returns:
        The time of the last frame before the correlation first falls below the threshold; 0 if that is the first.
    """
    a, b = (_centered(field.float().flatten(2)) for field in (prediction, target))
    correlation = (a * b).sum(2) / (a.norm(dim=2) * b.norm(dim=2)).clamp(min=_TINY)
    return (correlation >= threshold).long().cumprod(dim=1).sum(dim=1) * interval


class NRMSE(Metric):
    """`nrmse` over all samples of an epoch and all ranks."""

    full_state_update = False
    is_differentiable = True
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    @override
    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add a batch [batch, channels, *grid]."""
        errors = _nrmse_of_each(prediction.detach(), target)
        self.total += errors.sum()
        self.count += errors.numel()

    @override
    def compute(self) -> Tensor:
        """Return the mean over samples and channels."""
        return self.total / self.count


class SpectralError(Metric):
    """`spectral_error` over all samples of an epoch and all ranks.

    Args:
        edges: Wavenumbers between the bands.
        **options: Of torchmetrics.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, *, edges: Sequence[float] = (4, 12), **options: Any) -> None:
        super().__init__(**options)
        self.edges = tuple(edges)
        self.add_state("total", torch.zeros(len(self.edges) + 1), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    @override
    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add a batch [batch, channels, *grid]."""
        bands = _bands_of_each(prediction.detach(), target, edges=self.edges).flatten(0, 1)
        self.total += bands.sum(0)
        self.count += len(bands)

    @override
    def compute(self) -> Tensor:
        """Return the mean of each band."""
        return self.total / self.count


class CorrelationTime(Metric):
    """The mean of `correlation_time` over all samples of an epoch and all ranks.

    Args:
        threshold: The least correlation.
        interval: Between frames.
        **options: Of torchmetrics.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, *, threshold: float = 0.8, interval: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.threshold, self.interval = threshold, interval
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    @override
    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add rollouts [batch, time, channels, *grid]."""
        times = correlation_time(prediction.detach(), target, threshold=self.threshold, interval=self.interval)
        self.total += times.sum()
        self.count += len(times)

    @override
    def compute(self) -> Tensor:
        """Return the mean over samples."""
        return self.total / self.count


def _nrmse_of_each(prediction: Tensor, target: Tensor) -> Tensor:
    error, target = (prediction.float() - target.float()).flatten(2), target.float().flatten(2)
    return error.norm(dim=2) / target.norm(dim=2).clamp(min=_TINY)


def _bands_of_each(prediction: Tensor, target: Tensor, *, edges: Sequence[float]) -> Tensor:
    target, axes = target.float(), tuple(range(2, target.dim()))
    error = torch.view_as_real(torch.fft.fftn(prediction.float() - target, dim=axes)).square().sum(-1).flatten(2)
    waves = [torch.fft.fftfreq(points, 1 / points, device=target.device) for points in target.shape[2:]]
    wave = torch.stack(torch.meshgrid(*waves, indexing="ij")).norm(dim=0).flatten()
    band = torch.bucketize(wave, torch.tensor(edges, device="cpu", dtype=wave.dtype).to(wave.device, non_blocking=True))
    inside = (band[:, None] == torch.arange(len(edges) + 1, device=band.device)).float()
    # Parseval: the sum over the spectrum is that over the grid, times the number of its points.
    norm = target.flatten(2).norm(dim=2, keepdim=True).clamp(min=_TINY) * wave.numel() ** 0.5
    return (error @ inside).clamp(min=1e-30).sqrt() / norm  # an empty band would have no gradient


def _centered(values: Tensor) -> Tensor:
    return values - values.mean(dim=2, keepdim=True)
