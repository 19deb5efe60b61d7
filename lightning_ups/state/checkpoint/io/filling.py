"""Filling a tensor from the file it was saved in, or a part of it: each byte is read once, to where it belongs."""

from collections.abc import Callable
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from lightning_ups._compat.torch.tensors.tensor_files import template
from lightning_ups.state.checkpoint.checksums import Ends, RecordReader, Unverified
from lightning_ups.state.checkpoint.io.lanes import Lane, bytes_of

__all__ = ["Template", "fill"]

Template = tuple[Tensor, int] | None  # a tensor without its bytes, and where these begin


@torch.no_grad()
def fill(
    target: Tensor,
    item: ReadItem,
    *,
    view: IO[bytes],
    reader: RecordReader,
    lane: Lane,
    templates: dict[Ends, Template] | None = None,
) -> None:
    """Fill ``target`` with the part of a saved tensor that ``item`` asks for.

    A part that is one run of the file is read as such, straight into memory of the host, or through the buffers of
    ``lane`` into a GPU's. Of any other, the whole tensor is read, as torch's own reader reads every tensor.

    Args:
        target: Of the shape of the part.
        item: Which part.
        view: What ``torch.save`` wrote of that tensor.
        reader: Of the same bytes; its verifier may still be at work on them afterwards.
        lane: Of this thread.
        templates: Of tensors that were read before. Torch takes half a millisecond to parse one.

    Raises:
        ValueError: If the part has another shape, the file ends before, or it is not what was written.
    """
    if target.shape != item.lengths:
        raise ValueError(f"a part of shape {tuple(item.lengths)} cannot fill one of {tuple(target.shape)}")
    found = _template(view, reader.ends(), {} if templates is None else templates)
    if found is None or not found[0].is_contiguous():
        reader.verify()
        view.seek(0)
        whole = torch.load(view, map_location="cpu", weights_only=True)
        target.copy_(whole[_box(item)] if whole.dim() else whole)
        return
    saved, place = found
    start = _start_of_run(saved, item)

    def read(room: memoryview, at: int) -> Unverified | None:
        return reader.read(room, place + (start or 0) + at)

    if start is None:
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        _fill_row(whole, read, lane)
        target.copy_(whole[_box(item)])
        return
    is_direct = target.dtype == saved.dtype and target.device.type in ("cpu", "cuda") and target.is_contiguous()
    if is_direct and _fill_row(target, read, lane):
        return
    part = torch.empty(target.shape, dtype=saved.dtype)
    _fill_row(part, read, lane)
    target.copy_(part)


def _template(view: IO[bytes], ends: Ends | None, known: dict[Ends, Template]) -> Template:
    if ends is None or not ends.head:  # all of it may be anything
        return template(view)
    if ends not in known:
        known[ends] = template(view)
    return known[ends]


def _fill_row(target: Tensor, read: Callable[[memoryview, int], Unverified | None], lane: Lane) -> bool:
    row = bytes_of(target)
    if row is None:
        return False
    lane.fill(row, read)
    return True


def _start_of_run(saved: Tensor, item: ReadItem) -> int | None:
    """Return where the part begins in the bytes of the contiguous tensor ``saved``, or None if it is no single run."""
    partial = False
    for size, length in zip(reversed(saved.shape), reversed(item.lengths), strict=True):
        if partial and length != 1:
            return None
        partial = partial or length != size
    return saved.itemsize * sum(a * b for a, b in zip(item.storage_offsets, saved.stride(), strict=True))


def _box(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
