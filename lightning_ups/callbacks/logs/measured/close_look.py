"""A few profiled steps: where the host waits, and which kernels the device runs."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch

from lightning_ups._compat.torch.device import Kernels, is_profiled, watched_waits
from lightning_ups.insight.throughput import Inspection, Span, inspect_spans

__all__ = ["CloseLook", "can_look_at"]

# Number of steps: one to record waits; one to let ranks synchronize after the profiler has started, which takes longer
# on some and would look like communication; two to record kernels.
_WATCHED, _SETTLING, _LOOKED_AT = 1, 1, 2


def can_look_at(device: torch.device) -> bool:
    """Return whether kernels of ``device`` can be profiled now."""
    return device.type == "cuda" and not is_profiled()  # there is one profiler, and others may use it


class CloseLook:
    """Profiles a few steps, from the beginning of a step.

    Args:
        done: Called with the result.

    Attributes:
        steps: How many steps it takes.
    """

    steps = _WATCHED + _SETTLING + _LOOKED_AT

    def __init__(self, done: Callable[[Inspection], None]) -> None:
        self._done, self._ended = done, 0
        self._waits: Counter[str] = Counter()
        self._watch = ExitStack()
        self._kernels: Kernels | None = None
        self._watch.enter_context(watched_waits(self._waits))

    def next(self) -> "CloseLook | None":
        """Begin the next step. Return None after the last one."""
        self._ended += 1
        if self._ended == _WATCHED:
            self._watch.close()
            self._kernels = Kernels()
            self._kernels.start()
        if self._ended == _WATCHED + _SETTLING and self._kernels is not None:
            self._kernels.mark()
        if self._ended < self.steps:
            return self
        if self._kernels is not None:
            self._kernels.mark()
        spans = [Span(*kernel) for kernel in self.cancel()]
        waits = [(place, count // _WATCHED) for place, count in self._waits.most_common()]
        self._done(inspect_spans(spans, steps=_LOOKED_AT, waits=waits))
        return None

    def cancel(self) -> list[tuple[str, float, float]]:
        """Stop the profiler, and return its kernels."""
        self._watch.close()
        kernels, self._kernels = self._kernels, None
        return [] if kernels is None else kernels.stop()
