"""Looking at a few steps of a run closely: where the host waits, and what the device does, kernel by kernel."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch

from lightning_ups._compat.torch.device import Kernels, is_profiled, watched_waits
from lightning_ups.insight.throughput import Inspection, Span, inspect_spans

__all__ = ["CloseLook", "can_look_at"]

# Steps: for waits, one for ranks to meet again, since the profiler starts sooner on one than on another and the first
# to be ready would seem to communicate for long, and then kernel by kernel.
_WATCHED, _SETTLING, _LOOKED_AT = 1, 1, 2


def can_look_at(device: torch.device) -> bool:
    """Return whether kernels of ``device`` can be seen now."""
    return device.type == "cuda" and not is_profiled()  # there is one profiler, and it may be somebody else's


class CloseLook:
    """Some steps that are looked at: first for waits, then kernel by kernel. It begins with a step.

    Args:
        done: Is called with what was seen, when it is over.

    Attributes:
        steps: How many it takes.
    """

    steps = _WATCHED + _SETTLING + _LOOKED_AT

    def __init__(self, done: Callable[[Inspection], None]) -> None:
        self._done, self._ended = done, 0
        self._waits: Counter[str] = Counter()
        self._watch = ExitStack()
        self._kernels: Kernels | None = None
        self._watch.enter_context(watched_waits(self._waits))

    def next(self) -> "CloseLook | None":
        """Note that a step has ended and another begins; return None when it is over."""
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
        """Stop looking."""
        self._watch.close()
        kernels, self._kernels = self._kernels, None
        return [] if kernels is None else kernels.stop()
