"""A folder of latents, which several processes append to and read at the same time.

Each process that writes has files of its own: one with the bytes of all rows for each tensor of a sample, and an index
with the sample and a checksum of each row. A row exists when it is in the index, so an interrupted process leaves whole
rows, and any number of processes may continue. A row whose bytes do not fit its checksum does not exist either.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

INFO, _LAYOUT = "info.json", "layout.json"
_RECORD = np.dtype([("sample", "<i8"), ("sum", "<u8")])
_SYNC_S = 30  # after which rows survive a loss of power


class Latents:
    """The rows of a folder, for reading. A pickled one is its path.

    Args:
        path: The folder.
        samples: The number of samples of the data.
    """

    def __init__(self, path: Path, samples: int) -> None:
        self.path, self.samples = path, samples
        self._part = np.full(samples, -1, np.int32)
        self._row = np.zeros(samples, np.int64)
        self._sums = np.zeros(samples, np.uint64)
        self._parts: list[Path] = []
        self._seen: dict[Path, int] = {}  # rows of each index
        self._maps: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self._layout: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[type["Latents"], tuple[Path, int]]:
        return type(self), (self.path, self.samples)

    @property
    def count(self) -> int:
        """Samples that have a row."""
        return int((self._part >= 0).sum())

    @property
    def layout(self) -> dict[str, Any] | None:
        """The structure of a sample and the shape and dtype of its tensors; None before the first row."""
        with suppress(FileNotFoundError):
            self._layout = self._layout or json.loads((self.path / _LAYOUT).read_text())
        return self._layout

    def refresh(self) -> None:
        """Find the rows that were written since the last call."""
        for index in sorted(self.path.glob("*.index")):
            rows, known = index.stat().st_size // _RECORD.itemsize, self._seen.get(index, 0)
            if rows == known:
                continue
            if not known:
                self._parts.append(index.with_suffix(""))
            part = self._parts.index(index.with_suffix(""))
            added = np.fromfile(index, _RECORD, rows - known, offset=known * _RECORD.itemsize)
            self._part[added["sample"]] = part
            self._row[added["sample"]] = np.arange(known, rows)
            self._sums[added["sample"]] = added["sum"]
            self._seen[index] = rows
            self._maps = {key: mapped for key, mapped in self._maps.items() if key[0] != part}

    def has(self, samples: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return which of ``samples`` have a row."""
        asked = np.asarray(samples, np.int64)
        if (self._part[asked] < 0).any():
            self.refresh()
        return self._part[asked] >= 0

    def read(self, samples: Sequence[int]) -> tuple[np.ndarray[Any, Any], tuple[Tensor, ...]]:
        """Return which of ``samples`` have a good row, and the tensors of those, with the samples in front."""
        asked = np.asarray(samples, np.int64)
        there = self.has(samples)
        if not there.any():
            return there, ()
        layout = self.layout
        assert layout is not None
        found = asked[there]
        parts, rows = self._part[found], self._row[found]
        tensors = [np.empty((len(found), _num_bytes(leaf)), np.uint8) for leaf in layout["tensors"]]
        for part in np.unique(parts):
            here = np.flatnonzero(parts == part)
            for number, into in enumerate(tensors):
                mapped = self._mapped(int(part), number, into.shape[1])
                if len(here) == len(found):
                    np.take(mapped, rows, axis=0, out=into, mode="clip")  # it copies once
                else:
                    into[here] = mapped[rows[here]]
        good = _sums(tensors) == self._sums[found]
        if not good.all():
            self._part[found[~good]] = -1
            there[there] = good
            tensors = [each[good] for each in tensors]
        return there, tuple(_as_tensor(each, leaf) for each, leaf in zip(tensors, layout["tensors"], strict=True))

    def _mapped(self, part: int, number: int, width: int) -> np.ndarray[Any, Any]:
        if (part, number) not in self._maps:
            path = _file(self._parts[part], number)
            rows = self._seen[self._parts[part].with_suffix(".index")]
            if width and path.stat().st_size >= rows * width:
                mapped = np.memmap(path, np.uint8, "r", shape=(rows, width))
            else:  # the file has lost its end, which the checksums reveal
                kept = np.fromfile(path, np.uint8)[: rows * width]
                mapped = np.pad(kept, (0, rows * width - len(kept))).reshape(rows, width)
            self._maps[part, number] = mapped
        return self._maps[part, number]


class LatentsWriter:
    """Appends rows to a folder, in files of this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = path / f"{time.time_ns():016x}-{uuid4().hex[:8]}"
        self._files: list[int] = []
        self._rows = 0
        self._synced = time.monotonic()

    def append(self, samples: Iterable[int], structure: Any, tensors: Sequence[Tensor]) -> None:
        """Append a row for each of ``samples``.

        Raises:
            ValueError: If samples differ in structure, shape or dtype.
            OSError: If the disk is full. The rows before are kept.
        """
        layout = {
            "structure": structure,
            "tensors": [
                {"dtype": str(each.dtype).removeprefix("torch."), "shape": [*each.shape[1:]]} for each in tensors
            ],
        }
        self._check(layout)
        rows = [_bytes(each) for each in tensors]
        records = np.empty(len(rows[0]), _RECORD)
        records["sample"], records["sum"] = [*samples], _sums(rows)
        if not self._files:
            names = [*(_file(self._name, number) for number in range(len(rows))), self._name.with_suffix(".index")]
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._files = [os.open(name, how, 0o644) for name in names]
        try:
            for file, content in zip(self._files, (*rows, records), strict=True):
                _write(file, content)
        except OSError:
            widths = [*map(_num_bytes, layout["tensors"]), _RECORD.itemsize]
            for file, width in zip(self._files, widths, strict=True):
                os.ftruncate(file, self._rows * width)
            raise
        self._rows += len(records)
        if time.monotonic() - self._synced > _SYNC_S:
            self._sync()

    def close(self) -> None:
        """Make all rows permanent."""
        self._sync()
        for file in self._files:
            os.close(file)
        self._files = []

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file)
        self._synced = time.monotonic()

    def _check(self, layout: Mapping[str, Any]) -> None:
        path = self._path / _LAYOUT
        if not path.exists():
            write_json(path, layout)
        elif (before := json.loads(path.read_text())) != layout:
            raise ValueError(
                f"PrecomputedLatents needs samples of one shape, and a batch has {_said(layout)} after"
                f" {_said(before)}. Let the dataset or the encoder pad or resize them."
            )


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` so that a reader sees all of it or nothing."""
    part = path.with_suffix(f".{uuid4().hex[:8]}.part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)


def _write(file: int, content: np.ndarray[Any, Any]) -> None:
    left = content.reshape(-1).view(np.uint8).data
    while len(left):
        left = left[os.write(file, left) :]


def _file(part: Path, number: int) -> Path:
    return part.with_suffix(f".{number}")


def _num_bytes(leaf: Mapping[str, Any]) -> int:
    return getattr(torch, leaf["dtype"]).itemsize * prod(leaf["shape"])


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of each row."""
    host = tensor.detach().cpu().contiguous()
    return host.reshape(len(host), -1).view(torch.uint8).numpy() if host.numel() else np.empty((len(host), 0), np.uint8)


def _as_tensor(rows: np.ndarray[Any, Any], leaf: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, leaf["dtype"])
    return torch.from_numpy(rows).view(dtype).reshape(len(rows), *leaf["shape"])


def _sums(tensors: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return a checksum of each row, which is not 0 if all its bytes are."""
    total = np.ones(len(tensors[0]), np.uint64)
    for number, rows in enumerate(tensors):
        whole = rows.shape[1] // 8 * 8
        words = np.ascontiguousarray(rows[:, :whole]).view(np.uint64)
        each = words.sum(1, dtype=np.uint64) + rows[:, whole:].sum(1, dtype=np.uint64)
        total += each * np.uint64(2 * number + 1)
    return total


def _said(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{leaf['dtype']}{leaf['shape']}" for leaf in layout["tensors"])
