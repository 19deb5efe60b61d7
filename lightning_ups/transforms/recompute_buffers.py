"""Running a forward a second time on the buffers of the first, and without a trace on those of now.

Batch norm moves its running statistics at each forward, and spectral norm goes one step further in its iteration.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Buffers", "Rewound", "Taken"]


class Taken(NamedTuple):
    """A buffer and what was in it."""

    module: nn.Module
    name: str
    tensor: torch.Tensor
    value: torch.Tensor


class Buffers:
    """The buffers below a block that its forward changes, as the first forward in each mode of training tells."""

    def __init__(self, block: nn.Module) -> None:
        self._all = [(module, name) for module in block.modules() for name, _ in module.named_buffers(recurse=False)]
        self._changing: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}

    def take(self) -> list[Taken]:
        """Return what is in the buffers now; those that the forward is known to leave alone are left out."""
        buffers = ((m, name, m._buffers[name]) for m, name in self._changing.get(self._mode, self._all))
        return [Taken(m, name, buffer, buffer.clone()) for m, name, buffer in buffers if buffer is not None]

    def learn(self, before: list[Taken]) -> None:
        """Compare with ``before`` a forward, and take out of it what the forward left alone.

        The first forward of each mode waits for the device.
        """
        if self._mode not in self._changing:
            # By value: a version does not count what is done to `.data`, and a buffer may be another tensor now.
            before[:] = [taken for taken in before if not _is_as_it_was(taken)]
            self._changing[self._mode] = [(taken.module, taken.name) for taken in before]

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self._all)


class Rewound(AbstractContextManager[Any]):
    """A context with the buffers of ``before`` and, inside it, ``inner``; it may be entered again."""

    def __init__(self, buffers: Buffers, before: Sequence[Taken], inner: AbstractContextManager[Any]) -> None:
        self._buffers, self._before, self._inner = buffers, before, inner
        self._now: list[Taken] = []

    def __enter__(self) -> Any:
        self._now = self._buffers.take()
        _put(self._before)
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, trace)
        finally:
            _put(self._now)


def _put(values: Sequence[Taken]) -> None:
    with torch.no_grad():
        for module, name, buffer, value in values:
            module._buffers[name] = buffer
            buffer.copy_(value)


def _is_as_it_was(taken: Taken) -> bool:
    now = taken.module._buffers[taken.name]
    return now is not None and now.shape == taken.value.shape and torch.equal(now, taken.value)
