"""Reading small tensors of the device a fixed number of steps late, so that nobody waits for them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Deferred"]


class Deferred:
    """A queue of tensors on their way to the host.

    How late they are read is fixed, and does not depend on how fast a device is: every rank reads the same at the same
    step, and may act on it together with the others.

    Args:
        late: How many further tensors are pushed before one is read.
    """

    def __init__(self, *, late: int) -> None:
        self.late = late
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()

    def push(self, values: Tensor, tag: Any) -> None:
        """Send ``values`` to the host."""
        event = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((values, event, tag))

    def due(self) -> Iterator[tuple[list[float], Any]]:
        """Yield what was pushed more than ``late`` tensors ago, with its tag."""
        while len(self._waiting) > self.late:
            yield self._first()

    def rest(self) -> Iterator[tuple[list[float], Any]]:
        """Yield all that waits, for the end of training."""
        while self._waiting:
            yield self._first()

    def forget(self) -> None:
        """Drop all that waits."""
        self._waiting.clear()

    def _first(self) -> tuple[list[float], Any]:
        values, event, tag = self._waiting.popleft()
        if event is not None:
            event.synchronize()  # passed some steps ago, unless the host is that far ahead
        return values.tolist(), tag
