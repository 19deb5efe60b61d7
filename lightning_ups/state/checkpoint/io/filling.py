"""Fills a tensor, or a part of it, from the file it was saved in. Each byte is read once, into its final place."""

from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from lightning_ups._compat.torch.tensors.tensor_files import template
from lightning_ups.state.checkpoint.checksums import Ends, RecordReader
from lightning_ups.state.checkpoint.io.lanes import Lane, bytes_of

__all__ = ["Template", "fill"]

Template = tuple[Tensor, int] | None  # a tensor without its bytes, and the offset of these


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
    """Fill ``target`` with the part of a saved tensor that ``item`` selects.

    A part that is contiguous in the file is read directly into host memory, or through the buffers of ``lane`` into GPU
    memory. For any other part the whole tensor is read, as by torch's own reader.

    Args:
        target: A tensor with the shape of the part.
        item: The selected part.
        view: The bytes that ``torch.save`` wrote for the tensor.
        reader: A reader of the same bytes; its verifier may still use them when this returns.
        lane: The lane of this thread.
        templates: Tensors that were read before. Torch takes half a millisecond to parse one.

    Raises:
        ValueError: If the shapes differ, the file is too short, or it differs from what was written.
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
    if start is None:
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        _fill_row(whole, reader, place, lane)
        target.copy_(whole[_box(item)])
        return
    is_direct = target.dtype == saved.dtype and target.device.type in ("cpu", "cuda") and target.is_contiguous()
    if is_direct and _fill_row(target, reader, place + start, lane):
        return
    part = torch.empty(target.shape, dtype=saved.dtype)
    _fill_row(part, reader, place + start, lane)
    target.copy_(part)


def _template(view: IO[bytes], ends: Ends | None, known: dict[Ends, Template]) -> Template:
    if ends is None or not ends.head:  # it may contain anything
        return template(view)
    if ends not in known:
        known[ends] = template(view)
    return known[ends]


def _fill_row(target: Tensor, reader: RecordReader, place: int, lane: Lane) -> bool:
    row = bytes_of(target)
    if row is None:
        return False
    lane.fill(row, reader, place)
    return True


def _start_of_run(saved: Tensor, item: ReadItem) -> int | None:
    """Return the byte offset of the part in the contiguous tensor ``saved``, or None if it is not contiguous."""
    partial = False
    for size, length in zip(reversed(saved.shape), reversed(item.lengths), strict=True):
        if partial and length != 1:
            return None
        partial = partial or length != size
    return saved.itemsize * sum(a * b for a, b in zip(item.storage_offsets, saved.stride(), strict=True))


def _box(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
