"""Checksums of the files of a checkpoint: computed while a file is written, verified while it is read.

Note [Which checksum]. The 64-bit words of each row are added up. numpy adds as fast as memory is read (43 GB/s from the
cache on one core of a server, as XXH3), where CRC-32 of all bytes runs at 4 GB/s and SHA-256 at 1 GB/s. For the chunks
of a tensor, rows are sectors of 512 bytes. Each sum is mixed and multiplied by an odd number that belongs to its place,
and all are added up modulo 2**64: NumPy does that for many chunks in a few calls, and a GPU does it in the same way.
Mixing and multiplying can be undone, so a change of one sum changes the result; sectors that change places change it
because of the numbers. For everything else, CRC-32 runs over the sums of rows of 4 KiB. Words that change places within
a row are not noticed.

Note [Records]. What DCP saves of one tensor is a record: a run of bytes in a ``.distcp`` file. ``torch.save`` puts a
zip header before the tensor's bytes and a directory after them. Head and tail have a checksum each, and the bytes
between have one for each chunk, so that a rank that needs a part of a tensor verifies the chunks that it reads.

Note [Sums on the device]. Saving and loading are limited by the cores and the memory of the host. The checksums of the
chunks of a tensor on a GPU are therefore computed there, except for a last chunk that does not consist of whole rows.
The host receives 8 bytes per chunk.

Threads that read or write launch no kernels of sums: that would make the others wait for the GIL. One thread launches
the sums of all tensors, before they are written and after all have been read.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CHECKSUMS = "checksums.json"
CHUNK = 4 * 2**20  # bytes
ROW = 512  # bytes: a sector of a disk
_FILE_ROW = 4096  # bytes, in files that are summed as a whole
_BUFFER = 2**20  # bytes: small enough to stay in a core's cache between being read and being summed
_WORTH = 2**18  # bytes from which another thread, or the GPU, is used
_ODD = 0x9E3779B97F4A7C15  # its bits look random
_SIGNED_ODD = _ODD - 2**64


class DamagedFileError(ValueError):
    """A file of a checkpoint does not hold what was written."""


def checksum(data: Any, before: int = 0) -> int:
    """Return the checksum of ``data``, see Note [Which checksum].

    Args:
        data: Bytes.
        before: The checksum of the data before them, which must be whole rows.
    """
    view = memoryview(data).cast("B")
    rows = len(view) // _FILE_ROW
    if rows:
        words = np.frombuffer(view, dtype="<u8", count=rows * _FILE_ROW // 8).reshape(rows, _FILE_ROW // 8)
        before = zlib.crc32(np.add.reduce(words, axis=1), before)
    return zlib.crc32(view[rows * _FILE_ROW :], before)


def checksum_of_file(path: Path) -> int:
    """Return the checksum of all bytes of the file at ``path``."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_BUFFER):
            found = checksum(piece, found)
    return found


def worth_summing_on_device(row: Tensor) -> bool:
    """Return whether the device of ``row`` can compute its checksums faster than the host.

    Args:
        row: Contiguous bytes from the start of a chunk. The device needs aligned 64-bit words.
    """
    is_aligned = row.data_ptr() % 8 == 0 and row.storage_offset() % 8 == 0
    return row.nbytes >= _WORTH and is_aligned


def device_sums(data: Sequence[Tensor], chunk: int = CHUNK) -> Tensor:
    """Return the checksums of all chunks of ``data``, whole rows of bytes on one device, which computes them.

    They are signed numbers of 64 bits, and on that device if it had memory for the work.

    Args:
        data: Each begins at the start of a chunk.
        chunk: Bytes of each chunk, except for the last one of each of ``data``.
    """
    rows = [each.view(torch.int64).view(-1, ROW // 8) for each in data]
    per_chunk = chunk // ROW
    sizes = [-(-len(each) // per_chunk) * per_chunk for each in rows]
    try:
        sums = torch.zeros(sum(sizes), dtype=torch.int64, device=data[0].device)
        for each, room in zip(rows, sums.split(sizes), strict=True):
            torch.sum(each, 1, out=room[: len(each)])
        # As `_places`. A copy of these would wait for the sums.
        places = _mixed_signed(torch.arange(1, per_chunk + 1, device=sums.device) * _SIGNED_ODD) | 1
        return (_mixed_signed(sums).view(-1, per_chunk) * places).sum(1)
    except torch.OutOfMemoryError:  # a checkpoint can still be saved and loaded when the GPU is full
        hosts = (memoryview(each.cpu().numpy()) for each in data)  # type: ignore[arg-type]
        found = [found for host in hosts for found in _sums(host, chunk)]
        return torch.from_numpy(np.array(found, dtype="<u8").view("<i8"))


def _sums(view: memoryview, chunk: int) -> list[int]:
    """Return the checksum of each ``chunk`` bytes of ``view``, whose rows are all summed in one call.

    NumPy releases the GIL during the call; many short calls would make threads wait for one another.

    Args:
        view: Bytes.
        chunk: Bytes of each chunk except the last.
    """
    if chunk % ROW:
        return [checksum(view[start : start + chunk]) for start in range(0, len(view), chunk)]
    count = len(view) // ROW
    if count == 0 and len(view):  # an optimizer has many counters of steps, and NumPy's calls take long for one
        return (_mixed(np.array([zlib.crc32(view) + (len(view) << 32)], dtype="<u8")) * _places(1)).tolist()
    per_chunk, rest = min(chunk // ROW, count + 1), view[count * ROW :]
    sums = np.zeros((-(-len(view) // chunk), per_chunk), dtype="<u8")
    words = np.frombuffer(view, dtype="<u8", count=count * ROW // 8).reshape(count, ROW // 8)
    np.add.reduce(words, axis=1, out=sums.reshape(-1)[:count])
    if rest:
        sums.reshape(-1)[count] = zlib.crc32(rest) + (len(rest) << 32)
    return (_mixed(sums) * _places(per_chunk)).sum(axis=1, dtype="<u8").tolist()


def _mixed(words: Any) -> Any:
    words = (words ^ (words >> 32)) * np.uint64(_ODD)
    return words ^ (words >> 29)


def _mixed_signed(words: Tensor) -> Tensor:
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * _SIGNED_ODD
    return words ^ ((words >> 29) & (2**35 - 1))


@lru_cache
def _places(count: int) -> Any:
    """Return an odd number for each of ``count`` places."""
    return _mixed(np.arange(1, count + 1, dtype="<u8") * np.uint64(_ODD)) | 1


@dataclass(frozen=True)
class Record:
    """The checksums of one record.

    Args:
        length: Total number of bytes.
        head: Number of bytes before those of the tensor.
        body: Number of bytes of the tensor, or all bytes if it is not a plain tensor.
        sums: Checksums of the head, of each chunk of the body, and of the tail.
        chunk: Bytes of each chunk except the last.
    """

    length: int
    head: int
    body: int
    sums: tuple[int, ...]
    chunk: int

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each part of the record that has a checksum."""
        end = self.head + self.body
        yield 0, self.head
        yield from ((start, min(start + self.chunk, end)) for start in range(self.head, end, self.chunk))
        yield end, self.length


class Piece(NamedTuple):
    """Bytes of a tensor on the host, and the checksums of the first chunks if a device has computed them."""

    data: memoryview
    sums: Sequence[int] = ()


@dataclass
class SummedRecord:
    """Writes one record to ``stream`` and computes its checksums, one for each ``chunk`` bytes of the tensor.

    A thread of ``helpers`` computes them during the write, so that an idle core hides the cost.
    """

    stream: IO[bytes]
    helpers: Executor
    chunk: int = CHUNK
    length: int = 0
    _sums: list[int] = field(default_factory=list)
    _head: int = 0

    def write_head(self, data: bytes) -> None:
        """Write the bytes before those of the tensor, if any."""
        self._head = len(data)
        self._write(data)

    def write_body(self, pieces: Iterable[Piece]) -> None:
        """Write the bytes of the tensor, in pieces of whole chunks except for the last piece."""
        for view, known in pieces:
            self._sums += known
            rest = view[len(known) * self.chunk :]
            if len(rest) < _WORTH:
                self._sums += _sums(rest, self.chunk) if rest else ()
                self.stream.write(view)
            else:
                sums = self.helpers.submit(_sums, rest, self.chunk)
                self.stream.write(view)
                self._sums += sums.result()
            self.length += len(view)

    def write_tail(self, data: bytes) -> Record:
        """Write the bytes after those of the tensor, and return the checksums of the record."""
        body = self.length - self._head
        self._write(data)
        return Record(self.length, self._head, body, tuple(self._sums), self.chunk)

    def _write(self, data: Any) -> None:
        self._sums.append(checksum(data))
        self.stream.write(data)
        self.length += len(data)


@dataclass(frozen=True)
class Chunks:
    """Whole chunks of one record, all of them whole rows, whose rows a device sums.

    Args:
        data: Their bytes.
        expected: The checksum of each chunk.
        name: The name of the file, for the error.
    """

    data: Tensor
    expected: tuple[int, ...]
    name: str

    def check(self, found: Sequence[int]) -> None:
        """Compare the checksums that were ``found`` with the expected ones.

        Raises:
            DamagedFileError: If they differ.
        """
        _check(found, self.expected, self.name)


class Verifier:
    """Verifies the chunks that one thread reads, one record at a time, while the next is read.

    Args:
        helpers: Threads that compute checksums. None: the reading thread does.
    """

    def __init__(self, helpers: Executor | None = None) -> None:
        self._helpers = helpers
        self._under_way: Future[None] | None = None

    def verify(self, data: memoryview, *, chunk: int, expected: Sequence[int], name: str) -> None:
        """Compare the checksum of each ``chunk`` bytes of ``data`` with ``expected``; `wait` must follow.

        Until then, or until the next call has returned, a helper reads ``data``.

        Raises:
            DamagedFileError: If these or earlier data of the file ``name`` differ from what was written.
        """
        self.wait()
        if self._helpers is None or len(data) < _WORTH:
            _check_bytes(data, chunk, expected, name)
        else:
            self._under_way = self._helpers.submit(_check_bytes, data, chunk, expected, name)

    def wait(self) -> None:
        """Wait until everything is verified.

        Raises:
            DamagedFileError: If anything differs from what was written.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()


def _check_bytes(data: memoryview, chunk: int, expected: Sequence[int], name: str) -> None:
    _check(_sums(data, chunk), expected, name)


def _check(found: Sequence[int], expected: Sequence[int], name: str) -> None:
    if tuple(found) != tuple(expected):
        raise DamagedFileError(damage(name))


class Ends(NamedTuple):
    """The bytes before those of a tensor, the number of the tensor's bytes, and the bytes after them."""

    head: bytes
    body: int
    tail: bytes


class RecordReader:
    """Reads the bytes of one record from ``file``, and verifies them.

    Args:
        file: The file with the record.
        offset: The start of the record in the file.
        record: Its checksums. None: nothing is verified.
        name: The name of the file, for the error.
        verifier: The verifier of the reading thread, which may still be busy with the previous record.
    """

    def __init__(
        self, file: IO[bytes], *, offset: int, record: Record | None, name: str, verifier: Verifier | None = None
    ) -> None:
        self._file, self._offset, self._record, self._name = file, offset, record, name
        self._verifier = verifier or Verifier()
        self._kept: tuple[int, bytearray] | None = None  # the last chunk that was read in part

    def verify(self) -> None:
        """Verify the whole record.

        Raises:
            DamagedFileError: If it differs from what was written.
        """
        for number, (start, end) in enumerate(self._record.spans() if self._record is not None else ()):
            self._fill(memoryview(bytearray(end - start)), start, number)

    def ends(self) -> "Ends | None":
        """Verify and return the bytes before and after those of the tensor; None if there are no checksums.

        Raises:
            DamagedFileError: If they differ from what was written.
        """
        if self._record is None:
            return None
        spans, found = [*self._record.spans()], list[bytes]()
        for number in (0, len(spans) - 1):
            start, end = spans[number]
            content = bytearray(end - start)
            self._fill(memoryview(content), start, number)
            found.append(bytes(content))
        return Ends(found[0], self._record.body, found[1])

    def chunks_for_device(self, row: Tensor, place: int) -> tuple[int, Chunks] | None:
        """Return the chunks in ``row`` that its device can verify, and their start in it; None if there are none.

        Args:
            row: Bytes that `read` will fill.
            place: The place of the first one in the record.
        """
        record, end = self._record, place + row.nbytes
        if record is None or record.chunk != CHUNK or place < record.head or end > record.head + record.body:
            return None
        first, last = -((record.head - place) // CHUNK), (end - record.head) // CHUNK
        whole = end - record.head == record.body and record.body % ROW == 0
        start, stop = first * CHUNK, record.body if whole else last * CHUNK
        start, stop = record.head + start - place, record.head + stop - place
        if stop - start < _WORTH or not worth_summing_on_device(data := row[start:stop]):
            return None
        return start, Chunks(data, record.sums[first + 1 : first + 1 - (start - stop) // CHUNK], self._name)

    def read(self, room: memoryview, place: int, *, verify: bool = True) -> None:
        """Fill ``room`` with the bytes of the tensor, starting at ``place`` in the record.

        When this returns, a helper may still verify ``room``, but no earlier room; see `Verifier.verify`.

        Raises:
            DamagedFileError: If anything read here or before differs from what was written.
        """
        record = self._record
        if record is None or not verify:
            self._read(room, place)
            self._verifier.wait()
            return
        end = record.head + record.body
        if place + len(room) > end:  # only in a forged checkpoint: the loop would never end
            raise DamagedFileError(damage(self._name))
        whole: tuple[memoryview, tuple[int, ...]] | None = None
        while room:
            number = (place - record.head) // record.chunk
            start = record.head + number * record.chunk
            size = min(record.chunk, end - start)
            if place == start and len(room) >= size:
                part = room if place + len(room) == end else room[: len(room) // record.chunk * record.chunk]
                self._read(part, start)
                whole = part, record.sums[number + 1 : number + 1 - (-len(part) // record.chunk)]
            else:
                part = room[: start + size - place]
                part[:] = self._chunk(number, start, size)[place - start : place - start + len(part)]
            room, place = room[len(part) :], place + len(part)
        if whole is None:
            self._verifier.wait()
        else:
            self._verifier.verify(whole[0], chunk=record.chunk, expected=whole[1], name=self._name)

    def _chunk(self, number: int, start: int, size: int) -> bytearray:
        if self._kept is None or self._kept[0] != number:
            content = bytearray(size)
            self._fill(memoryview(content), start, number + 1)
            self._kept = number, content
        return self._kept[1]

    def _fill(self, room: memoryview, place: int, number: int) -> None:
        self._read(room, place)
        assert self._record is not None
        sums, chunk = self._record.sums, self._record.chunk
        is_chunk = 0 < number < len(sums) - 1
        _check(_sums(room, chunk) if is_chunk else [checksum(room)], sums[number : number + 1], self._name)

    def _read(self, room: memoryview, place: int) -> None:
        self._file.seek(self._offset + place)
        while room:
            count = self._file.readinto(room)  # type: ignore[attr-defined]
            if not count:
                raise ValueError("a file ends before the tensor that it holds")
            room = room[count:]


def damage(path: str | Path) -> str:
    """Return the error text for a file whose checksum does not match."""
    return (
        f"{path} is damaged: it does not hold what was saved, as its checksum shows."
        " Resume from an earlier checkpoint, and check the disk."
    )


def as_json(records: Mapping[tuple[str, int], Record]) -> bytes:
    """Return ``records``, by file and offset, as the content of `CHECKSUMS`."""
    files: dict[str, list[Any]] = {}
    for (name, offset), record in sorted(records.items()):
        files.setdefault(name, []).append([offset, record.length, record.head, record.body, record.chunk, record.sums])
    return json.dumps(files, separators=(",", ":")).encode()


def from_json(files: Any) -> dict[tuple[str, int], Record]:
    """Return the records that `as_json` wrote, from the parsed values.

    Raises:
        ValueError: If the values are inconsistent; other errors if they have wrong types.
    """
    records = {
        (name, offset): Record(length, head, body, tuple(sums), chunk)
        for name, entries in files.items()
        for offset, length, head, body, chunk, sums in entries
    }
    for (_, offset), record in records.items():
        numbers = (offset, record.length, record.head, record.body, record.chunk, *record.sums)
        is_positive = all(type(number) is int and number >= 0 for number in numbers) and record.chunk > 0
        chunks = -(-record.body // record.chunk)
        if not is_positive or record.head + record.body > record.length or len(record.sums) != chunks + 2:
            raise ValueError("its numbers do not belong together")
    return records
