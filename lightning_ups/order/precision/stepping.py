"""Optimizer steps: AdamW in one kernel, with gradient clipping in the same kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ups._compat.torch.optimizers import hooked_once
from lightning_ups.optim import MasteredOptimizer, OffloadedOptimizer
from lightning_ups.optim.adamw_step import OneKernel, one_kernel
from lightning_ups.order.run import Report
from lightning_ups.transforms.clip import (
    TakesClipCoefficient,
    clip_by_value,
    clip_coefficient,
    gradients_of,
    over_stages,
    scale_gradients,
    total_norm,
)


class Stepping:
    """Makes the optimizer steps of a run, and clips gradients by a norm that stays on the device.

    Attributes:
        allows_one_kernel: Whether AdamW's step may be one kernel, which rounds differently from torch's.
        grad_norm: The norm at the last clipped step, on the device: reading it synchronizes.
        stages: The ranks that have other parameters, as stages of a pipeline, or None.
    """

    def __init__(self) -> None:
        self.allows_one_kernel = True
        self.grad_norm: Tensor | None = None
        self.stages: ProcessGroup | None = None
        self._kernels: dict[Optimizer, OneKernel] = {}
        self._folds = False  # the current step multiplies gradients by the clip coefficient itself
        self._coefficient: Tensor | None = None

    def step(
        self, optimizer: Optimizer, *, by_torch: Callable[[], Any], closure: Callable[[], Any], report: Report | None
    ) -> Any:
        """Step in one kernel if `adamw_step` supports it, else with ``by_torch``; return the closure's result.

        Args:
            optimizer: The optimizer.
            by_torch: Makes the step as Lightning does.
            closure: Runs the training step, with its backward, and the hooks before the optimizer's step.
            report: The report that notes the first step in one kernel.
        """
        settings = one_kernel(optimizer) if self.allows_one_kernel else None
        if self.allows_one_kernel and isinstance(optimizer, OffloadedOptimizer):
            optimizer.allow_one_kernel()
        self._folds = settings is not None
        try:
            if settings is None:
                return by_torch()
            if optimizer not in self._kernels:
                self._kernels[optimizer] = OneKernel(optimizer)
                if report is not None:
                    report.update("Precision", step="one kernel")
            with hooked_once(optimizer):
                with torch.enable_grad():
                    result = closure()
                self._kernels[optimizer].step(optimizer, settings, coefficient=self._coefficient)
            return result
        finally:
            self._folds, self._coefficient = False, None

    def forget_optimizers(self) -> None:
        """Drop what was kept for the optimizers of a fit."""
        self._kernels.clear()

    def clip_by_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the gradients of ``optimizer`` down to a norm of at most ``max_norm``, now or in its step."""
        optimizer = _inside(optimizer)
        gradients = _gradients(optimizer)
        norm = total_norm(gradients)
        self.grad_norm = norm if self.stages is None else over_stages(norm, self.stages)
        coefficient = clip_coefficient(self.grad_norm, max_norm=max_norm)
        if self._folds:
            self._coefficient = coefficient
        elif isinstance(optimizer, TakesClipCoefficient):
            optimizer.take_clip_coefficient(coefficient)
        else:
            scale_gradients(gradients, coefficient)

    def clip_by_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp each gradient of ``optimizer`` to [-``limit``, ``limit``]."""
        clip_by_value(_gradients(_inside(optimizer)), limit=limit)


def _inside(optimizer: Optimizer) -> Optimizer:
    # A LightningOptimizer has the methods of its optimizer, as another object.
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _gradients(optimizer: Optimizer) -> Sequence[Tensor]:
    if isinstance(optimizer, (MasteredOptimizer, OffloadedOptimizer)):
        return optimizer.gradients()
    return gradients_of(p for group in optimizer.param_groups for p in group["params"])
