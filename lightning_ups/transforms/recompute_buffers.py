"""Running a forward a second time on the buffers of the first, and without a trace on those of now.

Batch norm moves its running statistics at each forward, and spectral norm goes one step further in its iteration.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_ups._compat.autograd import dense_parts, has_values, outside_modes

__all__ = ["Buffers", "Taken"]


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

    def run(self, before: list[Taken], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for the first time, if ``before`` is empty, or once more.

        Args:
            before: What was in the buffers at the first time, filled then, to be passed again.
            forward: What to run.
        """
        if not self._all:
            return forward()
        return self._run_again(before, forward) if before else self._run_first(before, forward)

    def _run_first(self, before: list[Taken], forward: Callable[[], Any]) -> Any:
        # A selective checkpoint counts every operator of both runs, and must not see those of ours.
        with outside_modes():
            before += self._take()
        result = forward()
        with outside_modes():
            if self._mode not in self._changing:
                # By value: a version does not count what is done to `.data`, and a buffer may be another tensor now.
                before[:] = [taken for taken in before if not _is_as_it_was(taken)]
                self._changing[self._mode] = [(taken.module, taken.name) for taken in before]
        return result

    def _run_again(self, before: Sequence[Taken], forward: Callable[[], Any]) -> Any:
        with outside_modes():
            now = self._take()
            _put(before)
        try:
            return forward()
        finally:
            with outside_modes():
                _put(now)

    def _take(self) -> list[Taken]:
        buffers = ((m, name, m._buffers[name]) for m, name in self._changing.get(self._mode, self._all))
        return [Taken(m, name, buffer, buffer.clone()) for m, name, buffer in buffers if buffer is not None]

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self._all)


def _put(values: Sequence[Taken]) -> None:
    with torch.no_grad():
        for module, name, buffer, value in values:
            module._buffers[name] = buffer
            buffer.copy_(value)


def _is_as_it_was(taken: Taken) -> bool:
    now = taken.module._buffers[taken.name]
    if now is None or not has_values(now):
        return False  # who knows
    if now.shape != taken.value.shape or now.layout is not taken.value.layout:
        return False
    return all(map(torch.equal, dense_parts(now), dense_parts(taken.value)))
