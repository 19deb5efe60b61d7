"""What a line of the zoo consists of, and the LightningModules that several lines share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

__all__ = [
    "LINES",
    "Batches",
    "Classifier",
    "HuggingFace",
    "Line",
    "Regressor",
    "Work",
    "images",
    "line",
    "normal",
    "tokens",
]

Make = Callable[[Generator], Any]
DISTINCT = 4  # batches of each rank; training goes through them again and again


@dataclass
class Work:
    """A module with its data, as a user would pass both to ``Trainer.fit``.

    Args:
        module: To train.
        batch: Makes one batch, on the CPU, from a generator.
        callbacks: Makes the callbacks of this way to train; each run needs new ones.
        trainer: Arguments of the Trainer that belong to this way to train.
        epoch: Steps of an epoch. None: the run is one epoch.
        steps: Steps of the run, where its length must be known in advance. None: as many as timing takes.
    """

    module: LightningModule
    batch: Make
    callbacks: Callable[[], Sequence[Callback]] = tuple
    trainer: Mapping[str, Any] = field(default_factory=dict)
    epoch: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Line:
    """One line of the zoo.

    Args:
        name: Unique.
        family: For the averages of the report.
        needs: Packages that must be importable.
        way: How it is trained, if there is more to it than a loss and an optimizer.
        build: Builds it; ``tiny`` for the CPU.
        gate: Whether it is one of the 20 of the gate.
        draws: Whether the model draws random numbers in training, so that compiled losses differ from eager ones.
        unused: Whether some parameters get no gradient in some steps, which DDP has to be told.
    """

    name: str
    family: str
    needs: tuple[str, ...]
    way: str
    build: Callable[[bool], Work]
    gate: bool = False
    draws: bool = False
    unused: bool = False


LINES: dict[str, Line] = {}


def line(
    name: str,
    family: str,
    *needs: str,
    way: str = "",
    gate: bool = False,
    draws: bool = False,
    unused: bool = False,
) -> Callable[[Callable[[bool], Work]], Callable[[bool], Work]]:
    """Return a decorator that enters a function, which builds a line, in the list."""

    def enter(build: Callable[[bool], Work]) -> Callable[[bool], Work]:
        if name in LINES:
            raise ValueError(f"Two lines are named {name!r}.")
        LINES[name] = Line(name, family, needs, way, build, gate, draws, unused)
        return build

    return enter


class Batches(LightningDataModule):
    """The same few batches for each side, on the device of the run before it starts."""

    def __init__(self, make: Make, *, epoch: int) -> None:
        super().__init__()
        self._make, self._epoch = make, epoch

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        ranks, device = self.trainer.world_size, self.trainer.strategy.root_device
        made = [self._make(torch.Generator().manual_seed(number)) for number in range(DISTINCT * ranks)]
        made = [self.trainer.strategy.batch_to_device(batch, device) for batch in made]
        return DataLoader(_Repeated(made, self._epoch * ranks), batch_size=None)


class _Repeated(Dataset[Any]):
    def __init__(self, items: Sequence[Any], length: int) -> None:
        self._items, self._length = items, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]


class _Optimized(LightningModule):
    """Has AdamW as most scripts have it."""

    def __init__(self, net: nn.Module, *, lr: float = 3e-4) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class HuggingFace(_Optimized):
    """A model that computes its own loss, as those of transformers do."""

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self.net(**batch).loss


class Classifier(_Optimized):
    """A network that returns logits, of which the target has one fewer dimension."""

    def __init__(self, net: nn.Module, *, lr: float = 3e-4) -> None:
        super().__init__(net, lr=lr)
        self.criterion = nn.CrossEntropyLoss()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = self.criterion(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss


class Regressor(_Optimized):
    """A network that returns a field like its target."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)


def tokens(batch: int, length: int, vocabulary: int, *, labels: bool = True, mask: bool = False) -> Make:
    """Return what makes random token ids, as a batch of a model of transformers."""

    def make(generator: Generator) -> dict[str, Tensor]:
        ids = torch.randint(4, vocabulary, (batch, length), generator=generator)
        made = {"input_ids": ids}
        if mask:  # sequences of several lengths
            lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
            made["attention_mask"] = (torch.arange(length) < lengths).long()
        if labels:
            made["labels"] = ids.clone()
        return made

    return make


def images(batch: int, size: int, classes: int, *, channels: int = 3) -> Make:
    """Return what makes random images and their classes."""

    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(batch, channels, size, size, generator=generator)
        return pictures, torch.randint(classes, (batch,), generator=generator)

    return make


def normal(*shapes: tuple[int, ...]) -> Make:
    """Return what makes tensors of normal numbers, one for each shape."""
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)
