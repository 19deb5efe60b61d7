"""Moves the bytes of tensors between host or GPU memory and files, several at once.

A lane is the working state of one thread. It moves bytes of the host directly. Between a GPU and a file it alternates
between two small pinned buffers: while the file is written from one, the GPU fills the other. The GPU also computes
checksums, see Note [Sums on the device].

Note [Who has a lane]. A lane in use belongs to one call alone. It is kept for the next call only if all threads of the
call have ended without an error; after an error or an interrupt, nobody uses its buffers again. All threads end before
the error is raised: they check between pieces whether they must stop.
"""

import heapq
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ups._compat.torch.tensors.pinned import pinned, unpin
from lightning_ups.state.checkpoint.checksums import (
    CHUNK,
    ROW,
    Chunks,
    Piece,
    RecordReader,
    device_sums,
    worth_summing_on_device,
)

T = TypeVar("T")
PIECE = 8 * 2**20  # bytes: long enough for the bus, while two per lane fit into the caches of a server
MOST = 8
_PLAIN = (Tensor, nn.Parameter)
WORTH = 16 * 2**20  # bytes for which another lane is opened
BATCH = 2**30  # bytes whose checksums are computed at once; the sums of their rows take 16 MiB
# bytes: smaller tensors are bound by Python and not by the disk, and threads only disturb each other
SMALL = 64 * 2**10


def lanes_by_default() -> int:
    """Return the number of lanes of a rank: its share of the cores, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if torch.cuda.is_available():
        ranks = min(ranks, torch.cuda.device_count())  # of this machine
    return max(1, min(MOST, cores // ranks))


def spread(items: Iterable[T], *, nbytes: Callable[[T], int], parts: int) -> list[list[T]]:
    """Return ``items`` in up to ``parts`` non-empty lists of about equal total bytes."""
    loads = [(0, number, list[T]()) for number in range(parts)]
    for item in sorted(items, key=nbytes, reverse=True):
        load, number, chosen = heapq.heappop(loads)
        chosen.append(item)
        heapq.heappush(loads, (load + max(nbytes(item), 1), number, chosen))
    return [chosen for _, _, chosen in sorted(loads, key=lambda one: one[1]) if chosen]


def bytes_of(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor as a row of bytes, without a copy; None if it is not contiguous, or not plain."""
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
    """Wait for the work that this thread has queued on the GPUs of ``tensors``: lanes use other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def on_this_gpu() -> Callable[[], AbstractContextManager[Any]]:
    """Return a context manager with which another thread uses this thread's current GPU.

    A new thread starts with the first GPU. Its first CUDA call would take hundreds of megabytes there for each rank.
    """
    if not torch.cuda.is_initialized():
        return nullcontext
    return partial(torch.cuda.device, torch.cuda.current_device())


class Lanes:
    """Lanes whose buffers are reused, see Note [Who has a lane].

    Args:
        count: The number of concurrent lanes; None: by the cores of this machine, and none for a few megabytes.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count, self._lanes = count, list[Lane]()

    def count(self, sizes: Iterable[int]) -> int:
        """Return the number of lanes for tensors of these ``sizes``, in bytes."""
        worth = sum(nbytes for nbytes in sizes if nbytes > SMALL)
        return self._count or max(1, min(lanes_by_default(), -(-worth // WORTH)))

    def run(self, work: Callable[["Lane", int, T], Any], parts: Sequence[T]) -> None:
        """Call ``work`` with a lane, an index, and the part of that index, for all parts concurrently.

        Raises:
            BaseException: What interrupted this thread, or the first error of a thread, once all have ended.
        """
        lanes, self._lanes = self._lanes, []
        lanes += [Lane() for _ in range(len(parts) - len(lanes))]

        def work_to_the_end(number: int) -> None:
            work(lanes[number], number, parts[number])
            lanes[number].settle()

        crew = _Crew(lanes, work_to_the_end, size=len(parts))
        try:
            crew.work()
            verify(*lanes)
        except BaseException:
            try:
                crew.end()
            finally:  # it may have been interrupted, too
                for lane in lanes:
                    with suppress(Exception):  # of a GPU that has failed: the first error says more
                        lane.close()
            raise
        self._lanes += lanes

    def sums(self, rows: Iterable[Tensor]) -> list[list[int]]:
        """Return what `Lane.sums` returns."""
        return Lane().sums(rows)

    def close(self) -> None:
        """Free the buffers."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []


class _Crew:
    """Threads that work concurrently, including this one, each with a lane; they stop at the first error."""

    def __init__(self, lanes: Sequence["Lane"], work: Callable[[int], Any], *, size: int) -> None:
        self._lanes, self._work, self._size = lanes, work, size
        self._begun, self._ended = set[int](), set[int]()
        self._errors: list[BaseException] = []
        self._on_gpu = on_this_gpu()

    def work(self) -> None:
        """Do all the work, and raise the first error; `end` must follow an error."""
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
        """Stop all threads, and wait until they have ended, however often this is interrupted."""
        try:
            self._stop()
            # Not with `join`: after an interrupted `join` Python may assume that a running thread has ended
            # (python/cpython#90882). A thread that starts from now on sees that it must stop, and does nothing.
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
    """Ends the work of a thread because of an error in another thread."""


class Lane:
    """Moves bytes for one thread.

    Args:
        piece: The size of a buffer, in bytes.
    """

    def __init__(self, *, piece: int = PIECE) -> None:
        self.piece, self.chunk = piece, min(CHUNK, piece)
        self._buffers = dict[torch.device, tuple[_Buffer, _Buffer]]()
        self._stopped, self._filled = False, 0
        self._unverified = list[Chunks]()

    def stop(self) -> None:
        """Ask the thread that uses this lane to end soon; the lane cannot be used afterwards."""
        self._stopped = True

    def check(self) -> None:
        """End the work of this thread if it must stop."""
        if self._stopped:
            raise _Stopped

    def pieces(self, source: Tensor, sums: Sequence[int] = ()) -> Iterator[Piece]:
        """Return the bytes of ``source`` in pieces, each valid until the next one is requested.

        The data must be there: the caller has waited for the device's own work.

        Args:
            source: A row of bytes.
            sums: The checksums of its first chunks if they are known, see `sums`.
        """
        if self._direct(source):
            for piece in source.split(self.piece):
                self.check()
                yield Piece(_memory(piece))
            return
        buffers, fetched = self._both(source.device), list[_Buffer]()
        per_piece = self.piece // self.chunk
        for number, piece in enumerate(source.split(self.piece)):
            self.check()
            buffer = buffers[number % 2]
            buffer.fetch(piece, sums[number * per_piece : (number + 1) * per_piece])
            if fetched:
                yield fetched.pop().content()
            fetched.append(buffer)
        for buffer in fetched:
            yield buffer.content()

    def sums(self, rows: Iterable[Tensor]) -> list[list[int]]:
        """Return for each of ``rows`` the checksums that its device computes, see Note [Sums on the device].

        A last chunk is left to the host if it does not consist of whole rows of `ROW` bytes.
        """
        found = list[list[int]]()
        whole = dict[int, Tensor]()
        for number, row in enumerate(rows):
            found.append([])
            part = row if row.nbytes % ROW == 0 else row[: row.nbytes // self.chunk * self.chunk]
            if self.chunk == CHUNK and part.nbytes and not self._direct(row) and worth_summing_on_device(row):
                whole[number] = part
        for number, sums in zip(whole, _device_sums([*whole.values()]), strict=True):
            found[number] = sums
        return found

    def fill(self, target: Tensor, reader: RecordReader, place: int) -> None:
        """Fill ``target``, a row of bytes, and verify it; `settle` and then `verify` must follow.

        Args:
            target: To be filled.
            reader: A reader of the saved tensor.
            place: The place of the first byte in its record.

        Raises:
            DamagedFileError: If data read here or before differs from what was written.
        """
        found = None if self._direct(target) else reader.chunks_for_device(target, place)
        if found is None:
            self._fill(target, reader, place)
            return
        start, chunks = found
        end = start + chunks.data.nbytes
        if start:  # a part of a chunk
            self._fill(target[:start], reader, place)
        self._fill(chunks.data, reader, place + start, verify=False)
        if end < target.nbytes:
            self._fill(target[end:], reader, place + end)
        self._unverified.append(chunks)

    def _fill(self, target: Tensor, reader: RecordReader, place: int, *, verify: bool = True) -> None:
        for piece in target.split(self.piece) if target.nbytes else ():
            self.check()
            if self._direct(target):
                reader.read(_memory(piece), place, verify=verify)
            else:
                self._filled += 1  # of all rows: a helper may still verify the buffer that was filled last
                buffer = self._both(target.device)[self._filled % 2]
                reader.read(buffer.room(piece.nbytes), place, verify=verify)
                buffer.send(piece)
            place += piece.nbytes

    def settle(self) -> None:
        """Wait until everything is filled."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.wait()

    def take_unverified(self) -> list[Chunks]:
        """Return the chunks that were filled since the last call and that their device must verify."""
        unverified, self._unverified = self._unverified, []
        return unverified

    def close(self) -> None:
        """Free the buffers."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.wait()  # after an error it may still be filled
                unpin(buffer.memory)
        self._buffers, self._unverified = {}, []

    def _direct(self, row: Tensor) -> bool:
        return row.device.type == "cpu"

    def _both(self, device: torch.device) -> "tuple[_Buffer, _Buffer]":
        if device not in self._buffers:
            self._buffers[device] = _Buffer(self.piece, device), _Buffer(self.piece, device)
        return self._buffers[device]


def verify(*lanes: Lane) -> None:
    """Verify the chunks that ``lanes`` left to their devices, which must be filled.

    Raises:
        DamagedFileError: If anything differs from what was written.
    """
    unverified = [chunks for lane in lanes for chunks in lane.take_unverified()]
    sums = _device_sums([chunks.data for chunks in unverified])
    for chunks, found in zip(unverified, sums, strict=True):
        chunks.check(found)


class _Buffer:
    """Host memory, and the GPU stream that fills or reads it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device, self._used = device, 0
        self._sums: Sequence[int] = ()  # of the piece
        with self._on_device():
            self.memory = _pinned(nbytes)
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, piece: Tensor, sums: Sequence[int] = ()) -> None:
        self._used, self._sums = piece.nbytes, sums
        with self._at_work():
            self.memory[: self._used].copy_(piece, non_blocking=self._stream is not None)

    def content(self) -> Piece:
        self.wait()
        return Piece(_memory(self.memory[: self._used]), self._sums)

    def room(self, nbytes: int) -> memoryview:
        self.wait()
        self._used = nbytes
        return _memory(self.memory[:nbytes])

    def send(self, piece: Tensor) -> None:
        with self._at_work():
            piece.copy_(self.memory[: self._used], non_blocking=self._stream is not None)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        # Also on the device of the stream: leaving a stream restores that of the current device.
        with self._on_device(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _device_sums(data: Iterable[Tensor]) -> Iterator[list[int]]:
    """Yield the checksums of the chunks of each of ``data``, computed for many at once."""
    batches = [*_batches(data)]
    sums = [device_sums(batch) for batch in batches]  # all of them before the host waits for any
    for batch, found in zip(batches, sums, strict=True):
        numbers, start = found.cpu().numpy().view("<u8").tolist(), 0
        for each in batch:
            end = start - (-each.nbytes // CHUNK)
            yield numbers[start:end]
            start = end


def _batches(data: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    batch, nbytes = list[Tensor](), 0
    for each in data:
        if batch and (nbytes + each.nbytes > BATCH or each.device != batch[0].device):
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += each.nbytes
    if batch:
        yield batch


def _pinned(nbytes: int) -> Tensor:
    try:
        return pinned(nbytes)
    except RuntimeError as error:  # a slowly written checkpoint is better than none
        warnings.warn(
            f"{error} Until then checkpoints are copied through ordinary memory, which is slower.", stacklevel=2
        )
        return torch.empty(nbytes, dtype=torch.uint8)


def _memory(row: Tensor) -> memoryview:
    return memoryview(row.numpy())  # type: ignore[arg-type]
