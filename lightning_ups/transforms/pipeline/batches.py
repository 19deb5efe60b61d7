"""Splits a batch into microbatches."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from lightning_ups.kernels.attention import Documents


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return ``count`` equal microbatches of ``batch``, consecutive rows of all its tensors.

    Other values, and tensors of another length, are in each microbatch.

    Raises:
        ValueError: If ``batch`` has no tensor, or ``count`` does not divide its rows.
    """
    rows = num_rows(batch)
    if rows is None or rows % count:
        what = "without a tensor" if rows is None else f"of {rows} rows"
        raise ValueError(
            f"A batch {what} cannot be divided into microbatches={count}. Choose a batch_size that is a multiple of"
            " it, and drop_last=True in the DataLoader."
        )
    size = rows // count
    return [_part(batch, rows, number * size, (number + 1) * size) for number in range(count)]


def num_rows(batch: Any) -> int | None:
    """Return the length of the first tensor in ``batch``, or None."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    found = (num_rows(part) for part in _parts(batch))
    return next((rows for rows in found if rows is not None), None)


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [*batch.values()]
    if isinstance(batch, list | tuple):
        return [*batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return []


def _part(value: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Documents):
        return Documents.from_ids(value.ids[start:stop])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(part, rows, start, stop) for part in value))
    if isinstance(value, list | tuple):
        parts = [_part(part, rows, start, stop) for part in value]
        same = len(value) == rows and not any(isinstance(part, Tensor) for part in value)  # such as texts
        return type(value)(parts[start:stop] if same else parts)
    if isinstance(value, Mapping):
        # As Lightning moves batches: classes such as transformers' BatchEncoding are made anew from a dict.
        return type(value)({key: _part(part, rows, start, stop) for key, part in value.items()})  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _part(getattr(value, f.name), rows, start, stop) for f in fields(value)})
    return value
