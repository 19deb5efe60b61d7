"""The layout of a batch: its structure, the shapes of its tensors, and its other values."""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_VALUES = (bool, int, float, str, bytes, type(None))


def layout_of(batch: Any, tensors: list[Tensor], *, device: torch.device) -> Hashable:
    """Append the tensors of ``batch`` to ``tensors``, and return all that must be equal to use the same graph.

    Raises:
        TypeError: If a graph cannot read ``batch``.
    """
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided or batch.device != device or batch.requires_grad:
            raise TypeError(f"a {batch.layout} tensor on {batch.device}, requires_grad={batch.requires_grad}")
        tensors.append(batch)
        return batch.shape, batch.dtype
    if isinstance(batch, (tuple, list)):
        return (type(batch), *[layout_of(each, tensors, device=device) for each in batch])
    if isinstance(batch, Mapping):
        return (type(batch), *[(key, layout_of(each, tensors, device=device)) for key, each in batch.items()])
    if isinstance(batch, _VALUES):
        return type(batch), batch
    if is_dataclass(batch):
        return (
            type(batch),
            *[layout_of(getattr(batch, field.name), tensors, device=device) for field in fields(batch)],
        )
    raise TypeError(f"an object of {type(batch).__name__}")


def difference(one: Any, other: Any) -> str:
    """Return the first difference of two layouts."""
    are_sizes = isinstance(one, torch.Size) and isinstance(other, torch.Size)
    if not are_sizes and isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return next(difference(*pair) for pair in zip(one, other, strict=True) if pair[0] != pair[1])
    return f"{[*one]} and {[*other]}" if are_sizes else f"{one!r} and {other!r}"
