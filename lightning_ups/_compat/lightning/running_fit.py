"""What experiments on a running fit need: single steps outside of the loop, and how often checkpoints are saved."""

from collections import OrderedDict
from typing import Any


def step_arguments(trainer: Any, batch: Any) -> "OrderedDict[str, Any]":
    """Return the arguments that Lightning would pass to ``training_step``."""
    return trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)


def run_step(trainer: Any, batch: Any) -> None:
    """Run forward, backward and the optimizer step on ``batch``, as the loop does, with its hooks."""
    loop, arguments = trainer.fit_loop.epoch_loop, step_arguments(trainer, batch)
    if trainer.lightning_module.automatic_optimization:
        loop.automatic_optimization.run(trainer.optimizers[0], 0, arguments)
    else:
        loop.manual_optimization.run(arguments)


def save_interval(trainer: Any) -> int:
    """Return after how many batches a `ModelCheckpoint` saves; 0: not by steps."""
    steps = [getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks]
    return min((every for every in steps if every), default=0) * trainer.accumulate_grad_batches
