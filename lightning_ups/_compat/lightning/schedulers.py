"""Giving a learning-rate scheduler of torch another optimizer, which torch has no name for."""

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer

__all__ = ["bind_scheduler"]


def bind_scheduler(scheduler: Any, new: Mapping[Optimizer, Optimizer]) -> None:
    """Let ``scheduler``, and those inside it, drive ``new[optimizer]`` in the place of its ``optimizer``."""
    for inner in getattr(scheduler, "_schedulers", ()):  # SequentialLR and ChainedScheduler
        bind_scheduler(inner, new)
    later = new.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
    if later is not None:
        scheduler.optimizer = later
        _track_steps(later)


def _track_steps(optimizer: Optimizer) -> None:
    # Torch's schedulers mark the `step` of their optimizer when they are made, and warn where they find it unmarked.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function = type(optimizer).step

    @wraps(function)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        return function(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
