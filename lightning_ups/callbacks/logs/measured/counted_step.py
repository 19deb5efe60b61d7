"""Counting the FLOPs of a LightningModule's training step without acting on the run."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ups._compat.torch.flop_counter import run_backward
from lightning_ups.insight.throughput import StepFlops, step_flops
from lightning_ups.transforms.random_state import random_state, restore_random_state

__all__ = ["counted_step"]


def counted_step(module: LightningModule, batch: Any) -> StepFlops:
    """Return what one training step of ``module`` with ``batch`` costs, backward included; nothing of it is run.

    Raises:
        NotCopiedError: If the step uses something of which it cannot have a copy.
        Exception: Whatever the step raises on tensors without data.
    """
    state = random_state()
    try:
        optimizers = [_NoOptimizer() for _ in module.trainer.optimizers]
        return step_flops(
            module,
            batch,
            step=_training_step,
            attributes=_stand_ins(optimizers),
            instead=[(module.trainer, lambda twin: _NoTrainer(module.trainer, twin, optimizers))],
        )
    finally:
        restore_random_state(state)


def _training_step(module: Any, batch: Any) -> Any:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return module.training_step(iter([(batch, 0, 0)]))
    needed = [p for p in inspect.signature(module.training_step).parameters.values() if p.kind != p.KEYWORD_ONLY]
    return module.training_step(batch, 0) if len(needed) > 1 else module.training_step(batch)


def _stand_ins(optimizers: "list[_NoOptimizer]") -> dict[str, Any]:
    """Return what keeps a twin's step from acting on the run."""

    def nothing(*_: Any, **__: Any) -> None: ...

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


class _NoTrainer:
    """Answers as a Trainer does, by twins of what it has, and keeps to itself what is written to it."""

    def __init__(self, trainer: Any, twin: Callable[[Any, str], Any], optimizers: list[_NoOptimizer]) -> None:
        loggers = [_NoLogger(logger) for logger in trainer.loggers]
        vars(self).update(_trainer=trainer, _twin=twin, optimizers=optimizers, loggers=loggers)
        self.logger = loggers[0] if loggers else None

    def __getattr__(self, name: str) -> Any:
        return self._twin(getattr(self._trainer, name), f"self.trainer.{name}")


class _NoLogger:
    """Has everything that a logger and its experiment may have, and does nothing."""

    _TOLD = ("log_dir", "name", "root_dir", "save_dir", "version")

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name) if self._logger is not None and name in self._TOLD else _NoLogger()

    def __call__(self, *_: Any, **__: Any) -> "_NoLogger":
        return _NoLogger()

    __getitem__ = __enter__ = __call__

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __exit__(self, *_: object) -> None: ...
