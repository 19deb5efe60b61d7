"""Random tokens, for benchmarks."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_ups.data.crops import batches


class RandomTokens(LightningDataModule):
    """Uniformly random tokens [batch, seq + 1], generated on demand.

    The loss of a correct model stays at the logarithm of ``vocab_size``. A sample depends on its index and ``seed``.

    Args:
        vocab_size: Tokens are below this number.
        seq_len: Predicted tokens in each sample.
        batch_size: Samples in a batch on each device.
        num_samples: Samples in an epoch, on all devices.
        num_val_samples: Samples in a validation. None: two batches.
        seed: For the tokens.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        batch_size: int,
        num_samples: int = 1_000_000,
        num_val_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.batch_size = int(batch_size)  # a DataLoader refuses NumPy integers
        self.num_samples = num_samples
        self.num_val_samples = 2 * batch_size if num_val_samples is None else num_val_samples
        self.seed = int(seed)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(first=0, count=self.num_samples)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(first=self.num_samples, count=self.num_val_samples)

    def _loader(self, *, first: int, count: int) -> DataLoader[Tensor]:
        samples = _Samples(
            vocab_size=self.vocab_size, length=self.seq_len + 1, first=first, count=count, seed=self.seed
        )
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return batches(samples, batch_size=self.batch_size, pin_memory=on_gpu)


class _Samples(Dataset[Tensor]):
    def __init__(self, *, vocab_size: int, length: int, first: int, count: int, seed: int) -> None:
        self._vocab_size, self._length, self._first, self._count, self._seed = vocab_size, length, first, count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        # A CPU generator uses 32 bits of its seed. An odd factor separates the ranges of different seeds.
        random = torch.Generator().manual_seed((self._seed * 2_654_435_761 + self._first + index) % 2**32)
        return torch.randint(self._vocab_size, (self._length,), generator=random)

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self[index] for index in indices])
