"""The float32 master weights of a fit, and the gradients that they hold until an optimizer step."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_ups._compat.lightning.steps import bind_scheduler
from lightning_ups.optim import MasteredOptimizer, MasterWeights, go_by_the_name_of, reduce_into_masters

_LOOKING = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class Masters:
    """Give a module low-precision weights during a fit, while optimizers step float32 masters.

    Gradients accumulate in float32: after each backward they move to the masters, so that the next backward does not
    add to them in low precision. While a user's hook may read them, the parameters have their gradients again, and
    changes by the hook take effect.

    Args:
        module: The module; its float32 parameters become ``dtype``.
        dtype: The dtype to compute in.
        leave: Submodules whose parameters do not change.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, leave: Collection[nn.Module] = ()) -> None:
        self.weights = MasterWeights(module, dtype=dtype, leave=leave, tell=rank_zero_warn)
        self._optimizers: list[MasteredOptimizer] = []
        self._looking: set[str] = set()  # hooks in which user code may modify gradients
        self._undo = ExitStack()

    @property
    def step_masters(self) -> bool:
        """Whether a fit has begun, so that optimizers step the masters."""
        return bool(self._optimizers)

    @property
    def in_one_kernel(self) -> bool:
        """Whether every optimizer steps in one kernel."""
        return all(optimizer.in_one_kernel for optimizer in self._optimizers)

    def wrapped(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any], trainer: Trainer
    ) -> list[Optimizer]:
        """Return optimizers that replace ``optimizers`` and step the masters, until `undo`.

        Args:
            model: The module as wrapped by the strategy.
            optimizers: The user's optimizers.
            lr_schedulers: Configurations of their schedulers.
            trainer: The Trainer whose strategy gets the optimizers back.
        """
        wrapper = model if isinstance(model, DistributedDataParallel) else None
        accumulate = trainer.accumulate_grad_batches > 1 or any(
            isinstance(callback, GradientAccumulationScheduler)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        if wrapper is not None:
            reduce_into_masters(wrapper, self.weights)
            self.weights.accumulates = accumulate
        ours = [
            MasteredOptimizer(optimizer, self.weights, accumulate=accumulate, wrapper=wrapper)
            for optimizer in optimizers
        ]
        for optimizer, mastered in zip(optimizers, ours, strict=True):
            go_by_the_name_of(optimizer, mastered)

        def put_back() -> None:
            trainer.strategy.optimizers = [optimizer.undo() for optimizer in ours]
            for config in lr_schedulers:
                bind_scheduler(config.scheduler, dict(zip(ours, optimizers, strict=True)))

        for config in lr_schedulers:
            bind_scheduler(config.scheduler, dict(zip(optimizers, ours, strict=True)))
        self._undo.callback(put_back)
        self._optimizers, self._looking = ours, _looking(trainer)
        return [*ours]

    def undo(self) -> None:
        """Restore the float32 weights of the module, and the optimizers of the strategy."""
        self._undo.close()
        self._optimizers = []
        self.weights.undo()

    def set_gradients_aside(self, module: LightningModule) -> None:
        """Move the gradients of earlier backwards to the masters, if a step may have several."""
        if _adds_backwards(module):
            for optimizer in self._optimizers:
                optimizer.master_gradients.set_aside()

    def add_to_those_aside(self, module: LightningModule) -> None:
        """Add the gradients of this backward to those that `set_gradients_aside` has moved."""
        if _adds_backwards(module):
            for optimizer in self._optimizers:
                optimizer.master_gradients.add_to_those_aside()

    @contextmanager
    def gradients_shown(self, *hooks: str) -> Iterator[None]:
        """Give parameters their gradients while one of ``hooks`` may read them; changes take effect."""
        if self._looking.intersection(hooks):
            self.show_gradients()
        try:
            yield
        finally:
            self.take_over_gradients()

    def show_gradients(self) -> None:
        """Give parameters their gradients, rounded."""
        for optimizer in self._optimizers:
            optimizer.master_gradients.show()

    def show_gradients_again(self) -> None:
        """If gradients are shown, update them from the masters."""
        for optimizer in self._optimizers:
            optimizer.master_gradients.show_again()

    def take_over_gradients(self) -> None:
        """Write changes of shown gradients to the masters, and hide the gradients."""
        for optimizer in self._optimizers:
            optimizer.master_gradients.take_over()


def _adds_backwards(module: LightningModule) -> bool:
    """Return whether a step may have several backwards; callbacks may change the number during a fit."""
    return not module.automatic_optimization or module.trainer.accumulate_grad_batches > 1


def _looking(trainer: Trainer) -> set[str]:
    """Return the user's hooks in which gradients may be read and written; hooks of this package ask the precision."""
    callbacks = [c for c in trainer.callbacks if not type(c).__module__.startswith("lightning_ups.")]  # type: ignore[attr-defined]
    found = {name for name in _LOOKING if _overrides(trainer.lightning_module, name, of=LightningModule)}
    return found | {name for name in _LOOKING[:2] if any(_overrides(each, name, of=Callback) for each in callbacks)}


def _overrides(owner: Any, name: str, *, of: type) -> bool:
    """Return whether ``owner``, which may be any callable, overrides a method of class ``of``."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(of, name)
