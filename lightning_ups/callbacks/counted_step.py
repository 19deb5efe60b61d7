"""Counting the FLOPs of a LightningModule's training step without acting on the run."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ups._compat.flop_counter import run_backward
from lightning_ups.transforms.resume.random_state import host_state, restore_host_state
from lightning_ups.transforms.throughput import StepFlops, step_flops

__all__ = ["counted_step"]


def counted_step(module: LightningModule, batch: Any) -> StepFlops:
    """Return what one training step of ``module`` with ``batch`` costs, backward included; nothing of it is run.

    Raises:
        Exception: Whatever the step raises on tensors without data.
    """
    state = host_state()
    try:
        return step_flops(module, batch, step=_training_step, attributes=_stand_ins(module))
    finally:
        restore_host_state(state)


def _training_step(module: Any, batch: Any) -> Any:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return module.training_step(iter([(batch, 0, 0)]))
    needed = [p for p in inspect.signature(module.training_step).parameters.values() if p.kind != p.KEYWORD_ONLY]
    return module.training_step(batch, 0) if len(needed) > 1 else module.training_step(batch)


def _stand_ins(module: LightningModule) -> dict[str, Any]:
    """Return what keeps a twin's step from acting on the run."""

    def nothing(*_: Any, **__: Any) -> None: ...

    optimizers = [_NoOptimizer() for _ in module.trainer.optimizers]
    one_or_all = optimizers[0] if len(optimizers) == 1 else optimizers
    return {
        **dict.fromkeys(
            ("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"), nothing
        ),
        "manual_backward": _backward,
        "optimizers": lambda *_, **__: one_or_all,
        "lr_schedulers": lambda *_, **__: _NoOptimizer(),
        "all_gather": lambda data, *_, **__: data,
        "_device": torch.device("meta"),
    }


def _backward(loss: Tensor, *_: Any, **__: Any) -> None:
    run_backward(loss.sum())


class _NoOptimizer:
    """Has every method of an optimizer and of a scheduler, and does nothing."""

    param_groups: tuple[dict[str, float], ...] = ({"lr": 0.0},)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._run

    @staticmethod
    def _run(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return closure() if callable(closure) else None
