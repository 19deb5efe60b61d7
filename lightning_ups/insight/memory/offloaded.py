"""The host's memory in a dry run, to which a step moves tensors that it saves for backward."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import FakeTensor
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.optim.offload import Copy, Mark, Memory

__all__ = ["HostMemory"]


class HostMemory(Memory):
    """Holds fake tensors: copies nothing, and counts what is on the device in ``ledger``.

    Attributes:
        used: Bytes of the host's memory, at most.
    """

    moves = FakeTensor

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(torch.device("cpu"))  # the device of all fake tensors
        self.used = 0
        self._ledger = ledger
        self._owners: dict[int, str] = {}  # of the activation in each storage

    @override
    def host(self, nbytes: int) -> Tensor:
        with self._ledger.paused():
            memory = super().host(nbytes)
        self._ledger.leave_out(memory)
        self.used += nbytes
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
