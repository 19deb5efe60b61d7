"""The size of a batch, and batches like it with other sizes."""

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def batch_size(batch: Any) -> int | None:
    """Return the most frequent first dimension of the tensors in ``batch``, or None without tensors."""
    sizes = [tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()]
    return max(set(sizes), key=sizes.count) if sizes else None


def sequence_length(batch: Any) -> int | None:
    """Return the most frequent second dimension of the integer tensors in ``batch``, or None without them."""
    sizes = [tensor.shape[1] for tensor in _tensors(batch) if tensor.dim() >= 2 and not tensor.is_floating_point()]
    return max(set(sizes), key=sizes.count) if sizes else None


def resized(batch: Any, *, samples: int | None = None, tokens: int | None = None) -> Any:
    """Return a batch of meta tensors like ``batch``, with another number of samples or another sequence length."""
    size, length = batch_size(batch), sequence_length(batch)

    def other(tensor: Tensor) -> Tensor:
        shape = [*tensor.shape]
        if samples is not None and shape and shape[0] == size:
            shape[0] = samples
        if tokens is not None:
            shape = [*shape[:1], *(tokens if n == length else n for n in shape[1:])]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return apply_to_collection(batch, Tensor, other)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found
