"""Looking at a few steps of a run closely: where the host waits, and what the device does, kernel by kernel."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch

from lightning_ups._compat.kernels_seen import Kernels, is_profiled, watched_waits
from lightning_ups.transforms.throughput import Inspection, Span, look

__all__ = ["CloseLook", "can_look_at"]

_WATCHED, _LOOKED_AT = 1, 2  # steps: for waits, and then kernel by kernel


def can_look_at(device: torch.device) -> bool:
    """Return whether kernels of ``device`` can be seen now."""
    return device.type == "cuda" and not is_profiled()  # there is one profiler, and it may be somebody else's


class CloseLook:
    """Three steps that are looked at: one for waits, two kernel by kernel. Each call of `next` is a step's end."""

    def __init__(self, done: Callable[[Inspection], None]) -> None:
        self._done, self._left = done, _WATCHED + _LOOKED_AT
        self._waits: Counter[str] = Counter()
        self._watch = ExitStack()
        self._kernels: Kernels | None = None
        self._watch.enter_context(watched_waits(self._waits))

    def next(self) -> "CloseLook | None":
        """Go on with the next step; None when it is over."""
        self._left -= 1
        if self._left == _LOOKED_AT:
            self._watch.close()
            self._kernels = Kernels()
            self._kernels.start()
        if self._left > 0:
            return self
        spans = [Span(*kernel) for kernel in self.cancel()]
        waits = [(place, count // _WATCHED) for place, count in self._waits.most_common()]
        self._done(look(spans, steps=_LOOKED_AT, waits=waits))
        return None

    def cancel(self) -> list[tuple[str, float, float]]:
        """Stop looking."""
        self._watch.close()
        kernels, self._kernels = self._kernels, None
        return [] if kernels is None else kernels.stop()
