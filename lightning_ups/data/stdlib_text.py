"""The source code of Python's standard library as training text."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.data.crops import Crops, batches

# Tests are larger than the library. Tables of characters and documentation topics are so similar from file to file that
# the validation loss would be too low. The other folders are not part of the library, or differ between machines.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"})
_LEFT_OUT_FILES = ("_sysconfigdata", "_distutils_system_mod")
_BETWEEN_FILES = b"\0"  # does not occur in source files, so that it marks the beginning of one


class StdlibText(LightningDataModule):
    """The source files of Python's standard library as bytes: 256 tokens, without a tokenizer or a download.

    A batch is a tensor of bytes [batch, seq + 1]. Training crops are at random positions; validation crops are always
    the same. A hash of its name decides whether a file is for training or validation, equally on every machine.

    Args:
        seq_len: Predicted bytes in each crop.
        batch_size: Crops in a batch on each device. None: 8 on a CPU, 512 on a GPU.
        hold_out_one_in: One file in so many is for validation.
        num_crops: Crops in a training epoch, on all devices.
        num_val_crops: Crops in a validation, evenly spread over its files.
        seed: For the positions and the order of training crops.
        root: A folder of Python files. None: the standard library of this Python.

    Raises:
        ValueError: When training begins, if an epoch has fewer crops than a batch.
        RuntimeError: In ``setup``, if there are too few source files.

    Example::

        Trainer(max_steps=500).fit(GPTModule(size="tiny"), StdlibText())
    """

    vocab_size = 256
    train_tokens: Tensor
    val_tokens: Tensor

    def __init__(
        self,
        *,
        seq_len: int = 256,
        batch_size: int | None = None,
        hold_out_one_in: int = 16,
        num_crops: int = 2**17,
        num_val_crops: int = 256,
        seed: int = 0,
        root: str | None = None,
    ) -> None:
        super().__init__()
        # A DataLoader refuses NumPy integers, and they overflow with hashes.
        self.batch_size = None if batch_size is None else int(batch_size)
        self.seq_len, self.hold_out_one_in = seq_len, int(hold_out_one_in)
        self.num_crops, self.num_val_crops, self.seed = num_crops, num_val_crops, int(seed)
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.train_files: list[str] = []
        self.val_files: list[str] = []

    @override
    def setup(self, stage: str) -> None:
        if self.train_files:
            return
        names = _source_files(self.root)
        self.val_files = [name for name in names if _hash(name) % self.hold_out_one_in == 0]
        self.train_files = [name for name in names if _hash(name) % self.hold_out_one_in]
        self.train_tokens, self.val_tokens = self._read(self.train_files), self._read(self.val_files)
        shorter = min(len(self.train_tokens), len(self.val_tokens))
        if shorter <= self.seq_len:
            more = ", or a smaller seq_len or hold_out_one_in" if names else ""
            raise RuntimeError(
                f"{self.root} has {len(names)} source files, of which training or validation gets {shorter} bytes, less"
                f" than a crop of {self.seq_len + 1}. Some Pythons lack the source files of their standard library."
                f" Give a folder of Python files: StdlibText(root=...){more}."
            )

    @property
    def unigram_entropy(self) -> float:
        """The entropy of the training bytes in nats: the loss of a model that knows only their frequencies."""
        return unigram_entropy(self.train_tokens)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        crops = Crops.random(self.train_tokens, length=self.seq_len + 1, count=self.num_crops, seed=self.seed)
        return self._loader(crops, shuffle_seed=self.seed)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(Crops.spread(self.val_tokens, length=self.seq_len + 1, count=self.num_val_crops))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, with escapes for bytes that are not UTF-8."""
        return bytes(tokens).replace(_BETWEEN_FILES, b"\n").decode(errors="backslashreplace")

    def _loader(self, crops: Crops, *, shuffle_seed: int | None = None) -> DataLoader[Tensor]:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        size = self.batch_size or (512 if on_gpu else 8)
        least = size * (1 if self.trainer is None else self.trainer.world_size)
        if shuffle_seed is not None and len(crops) < least:  # incomplete batches are dropped
            raise ValueError(
                f"StdlibText(num_crops={len(crops)}) has fewer crops in an epoch than a batch of {size} on each device."
                " Training drops incomplete batches, and no other would remain."
                f" Use num_crops={least} or more, or a smaller batch_size."
            )
        return batches(crops, batch_size=size, pin_memory=on_gpu, shuffle_seed=shuffle_seed)

    def _read(self, names: Sequence[str]) -> Tensor:
        content = _BETWEEN_FILES.join((self.root / name).read_bytes() for name in names)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def unigram_entropy(tokens: Tensor) -> float:
    """Return the entropy, in nats, of the distribution of ``tokens``, which are not negative."""
    share = torch.bincount(tokens.int()).double() / len(tokens)
    return -torch.special.xlogy(share, share).sum().item()


def _source_files(root: Path) -> list[str]:
    """Return the sorted names of source files, relative to ``root``."""
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]  # `os.walk` enters these
        sources = (name for name in files if name.endswith(".py") and not name.startswith(_LEFT_OUT_FILES))
        # Editors mark an open file by a broken link.
        paths = (path for name in sources if (path := Path(folder) / name).is_file())
        names += [path.relative_to(root).as_posix() for path in paths]
    return sorted(names)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
