"""The profiler of a Trainer that was given none.

A Trainer enters a generator's context around each hook of each callback, the module and the strategy, some forty times
in a step, so that a profiler could time them. That is a fifth of what it costs the host in a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_ups._compat.patches import applied

__all__ = ["not_profiled"]

_NOTHING = nullcontext[Any]()


@contextmanager
def not_profiled(trainer: Trainer) -> Iterator[None]:
    """Enter no context for the profiler of ``trainer`` while this one is open, if it times nothing."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is not PassThroughProfiler:
        yield
        return
    target = "lightning.pytorch.profilers:PassThroughProfiler.profile"
    with applied(target, lambda _: lambda *_, **__: _NOTHING, owner=profiler):
        yield
