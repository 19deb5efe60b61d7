"""Where a rehearsed step moves what it saves for backward: a host whose memory is counted apart from the device's."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.torch.rehearsal import FakeTensor
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.optim.offload import Copy, Mark, Memory

__all__ = ["RehearsedMemory"]


class RehearsedMemory(Memory):
    """Memory for fake tensors, in which nothing is copied, and what is on the device is entered in a ledger.

    Args:
        ledger: What counts the device's memory.

    Attributes:
        on_host: The bytes of the host's memory that were ever taken.
    """

    moves = FakeTensor

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(torch.device("cpu"))  # as all fake tensors of a rehearsal
        self.on_host = 0
        self._ledger = ledger
        self._owners: dict[int, str] = {}  # whose activation is in which memory of the host

    @override
    def host(self, nbytes: int) -> Tensor:
        with self._ledger.paused():
            memory = super().host(nbytes)
        self._ledger.leave_out(memory)
        self.on_host += nbytes
        return memory

    @override
    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        for to, source in copies:
            self._owners[_storage(to)] = self._ledger.owner_of(source, "activations") or ""

    @override
    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        for to, source in copies:
            self._ledger.claim([to], "activations", self._owners[_storage(source)])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
