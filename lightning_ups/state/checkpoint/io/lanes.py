"""Moving the bytes of tensors between memory, of the host or of a GPU, and files: several at once.

A lane is what one thread needs. From and to the host it moves the bytes as they lie. Between a GPU and a file it has
two small pinned buffers, which take turns: while the file is written from one, the GPU fills the other. The GPU also
adds up the rows of each tensor, see Note [Sums on the device].

Note [Who has a lane]. A lane that is at work belongs to that work alone. It is kept for the next only when all that
worked beside it have ended well; after an error or an interrupt, wherever that came, nobody uses its buffers again. The
work itself ends before the error is out: threads look between pieces whether they are to stop.
"""

import heapq
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ups._compat.torch.tensors.pinned import pinned, unpin
from lightning_ups.state.checkpoint.checksums import (
    ROW,
    ExpectedRows,
    Piece,
    Unverified,
    row_sums,
    worth_summing_on_device,
)

__all__ = ["Lane", "Lanes", "bytes_of", "lanes_by_default", "on_this_gpu", "spread", "wait_for_devices"]

T = TypeVar("T")
PIECE = 8 * 2**20  # bytes: long for a bus, and two for each lane still lie in the caches of a server
MOST = 8
_PLAIN = (Tensor, nn.Parameter)
WORTH = 16 * 2**20  # bytes for which another lane is opened
MOST_ROWS = 2**17  # whose sums, a MiB of them, are verified at once
SMALL = 64 * 2**10  # bytes: what is no larger keeps Python busy and not the disk, and threads only disturb each other


def lanes_by_default() -> int:
    """Return how many lanes a rank has: its share of the cores, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if torch.cuda.is_available():
        ranks = min(ranks, torch.cuda.device_count())  # of this machine
    return max(1, min(MOST, cores // ranks))


def spread(items: Iterable[T], *, nbytes: Callable[[T], int], parts: int) -> list[list[T]]:
    """Return ``items`` in up to ``parts`` lists with about as many bytes each; none is empty."""
    loads = [(0, number, list[T]()) for number in range(parts)]
    for item in sorted(items, key=nbytes, reverse=True):
        load, number, chosen = heapq.heappop(loads)
        chosen.append(item)
        heapq.heappush(loads, (load + max(nbytes(item), 1), number, chosen))
    return [chosen for _, _, chosen in sorted(loads, key=lambda one: one[1]) if chosen]


def bytes_of(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor as one row of bytes, without a copy; None if it has gaps, or is not plain."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def wait_for_devices(tensors: Iterable[Any]) -> None:
    """Wait for what this thread has asked the GPUs of ``tensors`` to do: lanes have streams of their own."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def on_this_gpu() -> Callable[[], AbstractContextManager[Any]]:
    """Return a context in which another thread uses the GPU that this one uses.

    A new thread begins with the first GPU. What it asked of CUDA would take hundreds of megabytes there for each rank.
    """
    if not torch.cuda.is_initialized():
        return nullcontext
    return partial(torch.cuda.device, torch.cuda.current_device())


class Lanes:
    """Lanes whose buffers are kept for the next time, see Note [Who has a lane].

    Args:
        count: How many work at once; None decides by the cores of this machine, and opens none for a few megabytes.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count, self._lanes = count, list[Lane]()

    def count(self, sizes: Iterable[int]) -> int:
        """Return how many lanes move tensors of these ``sizes``, in bytes."""
        worth = sum(nbytes for nbytes in sizes if nbytes > SMALL)
        return self._count or max(1, min(lanes_by_default(), -(-worth // WORTH)))

    def run(self, work: Callable[["Lane", int, T], Any], parts: Sequence[T]) -> None:
        """Call ``work`` with a lane, a number, and the part of that number, for all at once.

        Raises:
            BaseException: What interrupted this thread, or the first that one of them raised, once all have ended.
        """
        lanes, self._lanes = self._lanes, []
        lanes += [Lane() for _ in range(len(parts) - len(lanes))]

        def work_to_the_end(number: int) -> None:
            work(lanes[number], number, parts[number])
            lanes[number].settle()

        crew = _Crew(lanes, work_to_the_end, size=len(parts))
        try:
            crew.work()
        except BaseException:
            try:
                crew.end()
            finally:  # it may have been interrupted, too
                for lane in lanes:
                    with suppress(Exception):  # of a GPU that has failed: the first error says more
                        lane.close()
            raise
        self._lanes += lanes

    def close(self) -> None:
        """Give the buffers back."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []


class _Crew:
    """Threads that work at once, this one among them, each with a lane; they stop at the first error."""

    def __init__(self, lanes: Sequence["Lane"], work: Callable[[int], Any], *, size: int) -> None:
        self._lanes, self._work, self._size = lanes, work, size
        self._begun, self._ended = set[int](), set[int]()
        self._errors: list[BaseException] = []
        self._on_gpu = on_this_gpu()

    def work(self) -> None:
        """Do all of it, and raise what went wrong; `end` must follow an error."""
        threads = [threading.Thread(target=self._beside, args=(n,), daemon=True) for n in range(1, self._size)]
        for thread in threads:
            thread.start()
        if self._size:
            self._guarded(0)
        for thread in threads:
            thread.join()
        if self._errors:
            raise next((error for error in self._errors if not isinstance(error, Exception)), self._errors[0])

    def end(self) -> None:
        """Let all stop, and wait until they have, however often this is interrupted."""
        try:
            self._stop()
            # Not by `join`: after one that was interrupted Python takes a thread for dead which is not
            # (python/cpython#90882). One that begins from now on sees that it is to stop, and does nothing.
            while self._begun - self._ended:
                time.sleep(0.002)
        except BaseException:
            self.end()
            raise

    def _beside(self, number: int) -> None:
        self._begun.add(number)
        try:
            self._guarded(number)
        finally:
            self._ended.add(number)

    def _guarded(self, number: int) -> None:
        try:
            self._lanes[number].check()
            with self._on_gpu():
                self._work(number)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (raised by the thread that all of them work for)
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        for lane in self._lanes:
            lane.stop()


class _Stopped(BaseException):
    """Ends the work of a thread because of what happened to another."""


class Lane:
    """Moves bytes for one thread.

    Args:
        piece: Bytes of a buffer.
    """

    def __init__(self, *, piece: int = PIECE) -> None:
        self.piece, self._buffers = piece, dict[torch.device, tuple[_Buffer, _Buffer]]()
        self._stopped, self._filled = False, 0
        self._summed = dict[torch.device, _Summed]()

    def stop(self) -> None:
        """Let the thread that works with it end soon; it is of no use afterwards."""
        self._stopped = True

    def check(self) -> None:
        """End the work of this thread if it is to stop."""
        if self._stopped:
            raise _Stopped

    def pieces(self, source: Tensor) -> Iterator[Piece]:
        """Return the bytes of ``source``, one row of them, each piece good until the next is asked for.

        What is to be read must be there: the caller has waited for the device's own work.
        """
        if self._direct(source):
            for piece in source.split(self.piece):
                self.check()
                yield Piece(_memory(piece))
            return
        buffers, fetched = self._both(source.device), list[_Buffer]()
        sums = buffers[0].row_sums(source) if worth_summing_on_device(source, chunk=self.piece) else None
        for number, piece in enumerate(source.split(self.piece)):
            self.check()
            buffer = buffers[number % 2]
            buffer.fetch(piece, None if sums is None else _sums_of(sums, number * self.piece, piece.nbytes))
            if fetched:
                yield fetched.pop().content()
            fetched.append(buffer)
        for buffer in fetched:
            yield buffer.content()

    def fill(self, target: Tensor, read: Callable[[memoryview, int], Unverified | None]) -> None:
        """Fill ``target``, one row of bytes, and verify it; `settle` must follow.

        Args:
            target: To be filled.
            read: Fills a view with what begins at a place of the row, and returns the chunks that are to be verified.

        Raises:
            DamagedFileError: If something read here or before is not what was written.
        """
        buffers: list[_Buffer] = [] if self._direct(target) else [*self._both(target.device)]
        start = end = 0
        on_device = list[tuple[int, ExpectedRows]]()  # each from which row on: what is between is verified
        for number, piece in enumerate(target.split(self.piece)):
            self.check()
            place = number * self.piece
            if buffers:
                self._filled += 1  # of all rows: a helper may still verify the buffer that was filled last
                buffer = buffers[self._filled % 2]
                unverified = read(buffer.room(piece.nbytes), place)
                buffer.send(piece)
            else:
                unverified = read(_memory(piece), place)
            if unverified is None:
                continue
            place += unverified.start
            if on_device or (buffers and self._sums_on_device(target[place:], unverified.chunk)):
                start = start if on_device else place
                end = place + len(unverified.data)
                on_device.append(((place - start) // ROW, unverified.for_rows()))
            else:
                unverified.check_on_host()
        if on_device:
            summed = self._summed.setdefault(target.device, _Summed(target.device))
            summed.add(target[start:end], on_device, after=buffers)

    def settle(self) -> None:
        """Wait until all is filled, and verified by the devices that hold it.

        Raises:
            DamagedFileError: If something is not what was written.
        """
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.wait()
        for summed in self._summed.values():
            summed.verify()

    def _sums_on_device(self, row: Tensor, chunk: int) -> bool:
        return self.piece % chunk == 0 and worth_summing_on_device(row, chunk=chunk)

    def close(self) -> None:
        """Give the buffers back."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.wait()  # after an error it may still be filled
                unpin(buffer.memory)
        self._buffers, self._summed = {}, {}

    def _direct(self, row: Tensor) -> bool:
        return row.device.type == "cpu"

    def _both(self, device: torch.device) -> "tuple[_Buffer, _Buffer]":
        if device not in self._buffers:
            self._buffers[device] = _Buffer(self.piece, device), _Buffer(self.piece, device)
        return self._buffers[device]


class _Buffer:
    """Memory of the host, and the stream of a GPU that fills or reads it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device, self._used = device, 0
        self._row_sums: memoryview | None = None  # of the piece
        with self._on_device():
            self.memory = _pinned(nbytes)
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, piece: Tensor, sums: memoryview | None = None) -> None:
        self._used, self._row_sums = piece.nbytes, sums
        with self._at_work():
            self.memory[: self._used].copy_(piece, non_blocking=self._stream is not None)

    def content(self) -> Piece:
        self.wait()
        return Piece(_memory(self.memory[: self._used]), self._row_sums)

    def room(self, nbytes: int) -> memoryview:
        self.wait()
        self._used = nbytes
        return _memory(self.memory[:nbytes])

    def send(self, piece: Tensor) -> None:
        with self._at_work():
            piece.copy_(self.memory[: self._used], non_blocking=self._stream is not None)

    def row_sums(self, row: Tensor) -> memoryview:
        with self._at_work():
            return _on_host(row_sums(row))

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def let_wait(self, stream: Any) -> None:
        if self._stream is not None:
            stream.wait_stream(self._stream)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        # Also on the device of the stream: leaving a stream goes back to one of the device that was in use.
        with self._on_device(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


class _Summed:
    """Rows that a device adds up, in a stream of its own, so that the thread that fills them goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sums, self._expected, self._rows = list[Tensor](), list[tuple[int, ExpectedRows]](), 0

    def add(self, row: Tensor, expected: Iterable[tuple[int, ExpectedRows]], *, after: Iterable[_Buffer]) -> None:
        """Let the device add up ``row`` when ``after`` have filled it; `verify` must follow.

        Args:
            row: Bytes.
            expected: What is expected of them, and from which of their rows on.
            after: What fills them.

        Raises:
            DamagedFileError: If something that was added before is not what was written.
        """
        for buffer in after:
            buffer.let_wait(self._stream)
        with self._at_work():
            self._sums.append(row_sums(row))
        self._expected += [(self._rows + first, part) for first, part in expected]
        self._rows += len(self._sums[-1])
        if self._rows >= MOST_ROWS:
            self.verify()

    def verify(self) -> None:
        """Verify all that was added.

        Raises:
            DamagedFileError: If something is not what was written.
        """
        sums, expected = self._sums, self._expected
        self._sums, self._expected, self._rows = [], [], 0
        if not sums:
            return
        with self._at_work():
            on_host = [_joined_on_host([*each]) for _, each in groupby(sums, key=lambda one: one.device)]
        found = on_host[0] if len(on_host) == 1 else memoryview(b"".join(on_host))
        for first, part in expected:
            part.check(found[8 * first : 8 * (first + part.rows)])

    def _at_work(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _joined_on_host(sums: list[Tensor]) -> memoryview:
    try:
        return _on_host(torch.cat(sums))
    except torch.OutOfMemoryError:  # a full GPU can still be filled
        return memoryview(b"".join(_on_host(each) for each in sums))


def _on_host(sums: Tensor) -> memoryview:
    return memoryview(sums.cpu().numpy()).cast("B")  # type: ignore[arg-type]


def _sums_of(sums: memoryview, place: int, nbytes: int) -> memoryview:
    """Return those of the whole rows of ``nbytes`` that begin at ``place``."""
    return sums[place // ROW * 8 :][: nbytes // ROW * 8]


def _pinned(nbytes: int) -> Tensor:
    try:
        return pinned(nbytes)
    except RuntimeError as error:  # a checkpoint that is written slowly is better than none
        warnings.warn(
            f"{error} Until then checkpoints are copied through ordinary memory, which is slower.", stacklevel=2
        )
        return torch.empty(nbytes, dtype=torch.uint8)


def _memory(row: Tensor) -> memoryview:
    return memoryview(row.numpy())  # type: ignore[arg-type]
