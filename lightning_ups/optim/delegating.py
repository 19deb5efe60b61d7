"""Optimizers that let another one make the step."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import overload

import torch
from torch.optim import Optimizer
from typing_extensions import override

__all__ = ["DelegatingOptimizer", "go_by_the_name_of"]


class DelegatingOptimizer(Optimizer):
    """Evaluates the closure once, before the step, which a subclass lets another optimizer make."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.delegate_step(loss, has_closure=closure is not None)
        return loss

    @abstractmethod
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        """Make the step; gradients are there, and ``loss`` is what the closure returned, if there was one."""


def go_by_the_name_of(known: Optimizer, ours: Optimizer) -> None:
    """Give the class of ``ours`` the name of that of ``known``, which it wraps.

    LearningRateMonitor and others name an optimizer by its class, and keep the name that it had.
    """
    ours.__class__ = _named(type(ours), type(known).__name__)


@cache
def _named(kind: type[Optimizer], name: str) -> type[Optimizer]:
    named = type(name, (kind,), {"__doc__": kind.__doc__})
    named.__module__, named.__qualname__ = kind.__module__, kind.__qualname__
    return named
