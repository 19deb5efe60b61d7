"""Checks the order of gathers and reductions, which must be the same on all ranks."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any
from zlib import crc32

import torch
from torch import nn
from typing_extensions import override

from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo
from lightning_ups.transforms.fsdp.stalls import StallWatch
from lightning_ups.transforms.fsdp.step_check import StepCheck
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.sharding import StepState

__all__ = ["CollectiveOrder"]


class CollectiveOrder(StepCheck):
    """Records which modules training steps call first, and which gradients are reduced.

    Only the first call of a module in a step counts: whether a later call gathers again depends on what is kept.

    Args:
        names: Names of the modules whose calls gather.
        stalls: Receives the same records, to find ranks that wait for each other.
        undo: Removes the hooks.

    Attributes:
        checksum: The checksum of all records; ranks with different checksums have run something different.
    """

    def __init__(self, names: Iterable[tuple[str, nn.Module]], *, stalls: StallWatch, undo: ExitStack) -> None:
        self.checksum = 0
        self._stalls, self._called, self._is_on = stalls, set[nn.Module](), False
        self._names = {module: name for name, module in names}

        def note(module: nn.Module, *_: Any) -> None:
            if self._is_on and torch.is_grad_enabled() and module not in self._called:
                self._called.add(module)
                self._note(self._names[module])

        hook = hidden_from_dynamo(note)  # graphs of functions that a user compiled would break at the checksum
        for module in self._names:
            undo.callback(module.register_forward_pre_hook(hook).remove)

    @override
    def begin(self, step: StepState, undo: ExitStack) -> None:
        self._called.clear()
        if step.is_training:
            self._stalls.begin_step()
            self._is_on = True
            undo.callback(self._rest)

    def note_reduction(self, names: Sequence[str]) -> None:
        """Record that the gradients of these parameters are about to be reduced."""
        if names:
            self._note(f"the reduction of gradients of {listed(names)}")

    def _rest(self) -> None:
        self._is_on = False

    def _note(self, name: str) -> None:
        self.checksum = crc32(name.encode(), self.checksum)
        self._stalls.note(name)
