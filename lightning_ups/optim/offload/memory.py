"""Where offloaded state is kept, where it is used, and the copies between the two."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.torch.tensors.pinned import pinned, unpin

__all__ = ["Copy", "Mark", "Memory", "StreamedMemory", "memory_of"]

Copy = tuple[Tensor, Tensor]  # to, from
Mark = Any  # a point in a queue of work that another queue can wait for; None: it has been passed


class Memory:
    """A device whose memory is the host's: copies are made when they are asked for.

    Work and copies are queues. A copy begins after the marks that it is given, and returns its own; work that reads
    what was copied waits for that.

    Attributes:
        moves: The class of the tensors that are moved; others stay where they are.
    """

    moves: type[Tensor] = Tensor

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` of host memory that the device copies to at full speed."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        """Give up what `host` returned; tensors in it stay as they are."""

    def room(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        """Copy from the host to the device."""
        for to, source in copies:
            to.copy_(source)

    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        """Copy from the device to the host."""
        for to, source in copies:
            to.copy_(source)

    def mark(self) -> Mark:
        """Return the point that work on the device is queued up to."""

    def wait(self, mark: Mark) -> None:
        """Let the work that is queued from now on begin after ``mark``."""

    def reach(self, mark: Mark) -> None:
        """Let the host wait until ``mark`` is passed."""

    def settle(self) -> None:
        """Let the host wait until every copy is made."""


class StreamedMemory(Memory):
    """A GPU: one stream copies up, one copies down, both beside the work."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @override
    def host(self, nbytes: int) -> Tensor:
        try:
            return pinned(nbytes)
        except RuntimeError as error:
            raise RuntimeError(
                f"{nbytes / 2**20:.0f} MiB of host memory could not be pinned for what is offloaded ({error})."
                " That is more than this machine has left, or than may be locked."
                " Leave more on the device, by OptimizerOffload(resident=...) or ActivationOffload(every_k=...), use a"
                " low-bit optimizer, or raise `ulimit -l`."
            ) from error

    @override
    def release(self, memory: Tensor) -> None:
        self.settle()
        unpin(memory)

    @override
    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        return self._copy(self._up, copies, after)

    @override
    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        return self._copy(self._down, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Iterable[Copy], after: Sequence[Mark]) -> Mark:
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            return stream.record_event()

    @override
    def mark(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    @override
    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    @override
    def reach(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    @override
    def settle(self) -> None:
        self._up.synchronize()
        self._down.synchronize()


def memory_of(device: torch.device) -> Memory:
    """Return the memory of ``device``: with streams where it has them."""
    return StreamedMemory(device) if device.type == "cuda" else Memory(device)
