"""Crops of one long sequence of tokens, copied one batch at a time."""

from collections.abc import Sequence
from typing import Any
from warnings import filterwarnings

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ups.data.workers import as_it_is


class Crops(Dataset[Tensor]):
    """A dataset of crops of equal length, of which a batch is one copy.

    Args:
        tokens: All tokens, 1-D, of any integer dtype, which the crops keep.
        starts: The position of each crop, 1-D.
        length: Tokens in a crop.
    """

    def __init__(self, tokens: Tensor, *, starts: Tensor, length: int) -> None:
        self.starts = starts
        # A view with a row for each possible position. By NumPy, since torch uses all cores for such a small copy, and
        # their busy waiting slows down the threads that feed a GPU.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens.numpy(), length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._windows[self.starts[index]].copy())

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Return the crops [batch, length]. A DataLoader calls this in place of ``__getitem__``."""
        return torch.from_numpy(self._windows[self.starts[torch.as_tensor(indices)].numpy()])

    @classmethod
    def random(cls, tokens: Tensor, *, length: int, count: int, seed: int) -> "Crops":
        """Return ``count`` crops of ``tokens`` at random positions."""
        random = torch.Generator().manual_seed(seed)
        return cls(tokens, starts=torch.randint(len(tokens) - length + 1, (count,), generator=random), length=length)

    @classmethod
    def spread(cls, tokens: Tensor, *, length: int, count: int) -> "Crops":
        """Return ``count`` crops, evenly spread over ``tokens`` from the first to the last."""
        starts = torch.linspace(0, len(tokens) - length, count, dtype=torch.float64).long()
        return cls(tokens, starts=starts, length=length)


def batches(
    dataset: Dataset[Tensor], *, batch_size: int, pin_memory: bool, shuffle_seed: int | None = None
) -> DataLoader[Tensor]:
    """Return a DataLoader of a dataset that returns batches, shuffled if there is a ``shuffle_seed``."""
    # A batch takes microseconds, less than its transfer from a worker process would.
    filterwarnings("ignore", message=".*does not have many workers")
    shuffled = shuffle_seed is not None
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffled,
        generator=torch.Generator().manual_seed(shuffle_seed) if shuffled else None,
        drop_last=shuffled,
        collate_fn=_pinned if pin_memory else as_it_is,
        pin_memory=pin_memory,
    )


def _pinned(batch: Any) -> Any:
    # Copied by NumPy, in one thread, unlike the pinning of a DataLoader.
    pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
    pinned.numpy()[...] = batch.numpy()
    return pinned
