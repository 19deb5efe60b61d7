"""Filling a tensor from the file it was saved in, or a part of it: each byte is read once, to where it belongs."""

from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from lightning_ups._compat.tensor_files import template
from lightning_ups.transforms.checkpoint.lanes import Lane, bytes_of

__all__ = ["fill"]


@torch.no_grad()
def fill(target: Tensor, item: ReadItem, *, view: IO[bytes], file: IO[bytes], offset: int, lane: Lane) -> None:
    """Fill ``target`` with the part of a saved tensor that ``item`` asks for.

    A part that is one run of the file is read as such, straight into memory of the host, or through the buffers of
    ``lane`` into a GPU's. Of any other, the whole tensor is read, as torch's own reader reads every tensor.

    Args:
        target: Of the shape of the part.
        item: Which part.
        view: What ``torch.save`` wrote of that tensor.
        file: The file, in which the view begins at ``offset``.
        offset: In bytes.
        lane: Of this thread.

    Raises:
        ValueError: If the part has another shape, or the file ends before.
    """
    if target.shape != item.lengths:
        raise ValueError(f"a part of shape {tuple(item.lengths)} cannot fill one of {tuple(target.shape)}")
    found = template(view)
    start = None if found is None else _start_of_run(found[0], item)
    if found is None or start is None:
        view.seek(0)
        whole = torch.load(view, map_location="cpu", weights_only=True)
        target.copy_(whole[_box(item)] if whole.dim() else whole)
        return
    saved, place = found
    begin = offset + place + start

    def read(room: memoryview, at: int) -> None:
        _read(file, room, begin + at)

    row = bytes_of(target) if target.dtype == saved.dtype and target.device.type in ("cpu", "cuda") else None
    if row is not None and target.is_contiguous():
        lane.fill(row, read)
        return
    part = torch.empty(target.shape, dtype=saved.dtype)
    row = bytes_of(part)
    assert row is not None
    lane.fill(row, read)
    target.copy_(part)


def _start_of_run(saved: Tensor, item: ReadItem) -> int | None:
    if not saved.is_contiguous():
        return None
    partial = False
    for size, length in zip(reversed(saved.shape), reversed(item.lengths), strict=True):
        if partial and length != 1:
            return None
        partial = partial or length != size
    return saved.itemsize * sum(a * b for a, b in zip(item.storage_offsets, saved.stride(), strict=True))


def _box(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))


def _read(file: IO[bytes], room: memoryview, place: int) -> None:
    file.seek(place)
    while room:
        count = file.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise ValueError("a file ends before the tensor that it holds")
        room = room[count:]
