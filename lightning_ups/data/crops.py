"""Crops of one long row of tokens, taken a batch at a time."""

from collections.abc import Sequence
from typing import Any
from warnings import filterwarnings

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ups.order.arguments import check_least

__all__ = ["Crops", "batches", "check_counts"]


def check_counts(of: str, *, optional: str, **counts: tuple[int | None, int]) -> None:
    """Raise unless each count is a whole number of at least what is given beside it.

    Args:
        of: The class that has them.
        optional: Which of them may be None.
        **counts: The counts and their least, by name.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is less.
    """
    why = "It counts what there is to train on, or to validate."
    for name, (value, least) in counts.items():
        check_least(name, value, least, of=of, why=why, optional=name == optional)


class Crops(Dataset[Tensor]):
    """Crops of equal length; the sampler chooses among them, and a whole batch is one copy.

    Args:
        tokens: All tokens [length], of any integer type, which the crops keep.
        starts: Where each crop starts [number of crops].
        length: Tokens of a crop.
    """

    def __init__(self, tokens: Tensor, *, starts: Tensor, length: int) -> None:
        self.starts = starts
        # A view: one row for every place where a crop can start. NumPy's, since torch would share so small a copy out
        # among all cores, which then wait busily for more work, in the way of the threads that feed a GPU.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens.numpy(), length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._windows[self.starts[index]].copy())

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Return the crops [batch, length]; a loader calls this instead of asking for them one by one."""
        return torch.from_numpy(self._windows[self.starts[torch.as_tensor(indices)].numpy()])

    @classmethod
    def random(cls, tokens: Tensor, *, length: int, count: int, seed: int) -> "Crops":
        """Return ``count`` crops at random places of ``tokens``."""
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
    """Return a loader whose dataset makes whole batches; with ``shuffle_seed``, in an order that it fixes."""
    # A batch takes some microseconds, and handing it over from a worker would take longer. Lightning cannot know.
    filterwarnings("ignore", message=".*does not have many workers")
    shuffled = shuffle_seed is not None
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffled,
        generator=torch.Generator().manual_seed(shuffle_seed) if shuffled else None,
        drop_last=shuffled,
        collate_fn=_pinned if pin_memory else _as_it_is,
        pin_memory=pin_memory,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _pinned(batch: Any) -> Any:
    # By one thread as well, which the loader's own copy into pinned memory would not be.
    pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
    pinned.numpy()[...] = batch.numpy()
    return pinned
