"""Optimizers that wrap others have the class names of those."""

from functools import cache

from torch.optim import Optimizer

__all__ = ["go_by_the_name_of"]


def go_by_the_name_of(known: Optimizer, ours: Optimizer) -> None:
    """Give the class of ``ours`` the name of that of ``known``, for which it stands.

    What names an optimizer by its class, as LearningRateMonitor does, then goes on under the name that it had.
    """
    ours.__class__ = _named(type(ours), type(known).__name__)


@cache
def _named(kind: type[Optimizer], name: str) -> type[Optimizer]:
    named = type(name, (kind,), {"__doc__": kind.__doc__})
    named.__module__, named.__qualname__ = kind.__module__, kind.__qualname__
    return named
