"""Reads small tensors of the device a fixed number of steps late, so that nothing waits for them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Deferred"]


class Deferred:
    """A queue of tensors that are being copied to the host.

    The delay is fixed, and does not depend on the speed of a device: all ranks read the same values at the same step,
    and can act on them together.

    Args:
        late: The number of later tensors that are pushed before one is read.
    """

    def __init__(self, *, late: int) -> None:
        self.late = late
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()

    def push(self, values: Tensor, tag: Any) -> None:
        """Start to copy ``values`` to the host."""
        event = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((values, event, tag))

    def due(self) -> Iterator[tuple[list[float], Any]]:
        """Yield the values that were pushed more than ``late`` tensors ago, with their tags."""
        while len(self._waiting) > self.late:
            yield self._first()

    def rest(self) -> Iterator[tuple[list[float], Any]]:
        """Yield all remaining values, at the end of training."""
        while self._waiting:
            yield self._first()

    def forget(self) -> None:
        """Drop all remaining values."""
        self._waiting.clear()

    def _first(self) -> tuple[list[float], Any]:
        values, event, tag = self._waiting.popleft()
        if event is not None:
            event.synchronize()  # already passed, unless the host is far ahead
        return values.tolist(), tag
