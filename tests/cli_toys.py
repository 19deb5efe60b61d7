"""What a user names in YAML: a module, its data, a callback, and a strategy that replaces parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader


class Toy(LightningModule):
    """Two blocks; remembers its optimizer."""

    def __init__(self, width: int = 8, act: Literal["gelu", "relu"] = "gelu", fail: str = ""):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(2)
        )
        self.fail = fail
        if fail == "init":
            raise RuntimeError("the user's own error")

    def loss(self, batch):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def training_step(self, batch, _):
        if self.fail == "step":
            raise KeyError("the user's own error")
        if self.fail == "interrupt":
            raise KeyboardInterrupt
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Predicting(Toy):
    """Predicts."""

    def predict_step(self, batch, _):
        return self.loss(batch)

    def predict_dataloader(self):
        return DataLoader(torch.randn(4, 8), batch_size=2)


class Keeping(Predicting):
    """Keeps what it has predicted."""

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.kept = outputs


class Writing(BasePredictionWriter):
    """Takes what is predicted, and writes nothing."""

    def __init__(self):
        super().__init__("epoch")

    def write_on_epoch_end(self, *_):
        """Write nothing."""


class Interrupting(Callback):
    """Presses Ctrl-C."""

    def __init__(self, after: int):
        self.after = after

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.after:
            raise KeyboardInterrupt


class Nowhere(Logger):
    """Keeps what it gets on a server, and has no folder."""

    name = "nowhere"
    version = "run-1"

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params, *args, **kwargs): ...


class NeedsWidth(Toy):
    """Has a setting without a default."""

    def __init__(self, width: int):
        super().__init__(width=width)


class Shape(Enum):
    """A choice, which YAML has by its name."""

    ROUND = "o"
    SQUARE = "[]"


@dataclass
class Within:
    """What belongs together, below what belongs together."""

    x: int = 1
    y: int = 2


@dataclass
class Nested:
    """Has another one."""

    depth: int = 4
    within: Within = field(default_factory=Within)


class Part:
    """A class that a module is made with."""

    def __init__(self, p: int = 1, q: int = 2):
        self.p, self.q = p, q


class Various(Toy):
    """Takes what YAML writes in another way than Python has it; one setting has no default."""

    def __init__(
        self,
        width: int,
        shape: Shape = Shape.ROUND,
        file: Path = Path("a"),
        act_of: Callable = nn.functional.relu,
        pair: tuple[int, int] = (1, 2),
        nested: Nested = Nested(),  # noqa: B008
        maybe: Nested | None = None,
        part: Part | None = None,
    ):
        super().__init__(width=width)
        self.save_hyperparameters()
        self.nested, self.maybe, self.part, self.shape = nested, maybe, part, shape


class NoMeta(Toy):
    """Looks at its weights while it is built."""

    def __init__(self):
        super().__init__()
        self.first = self.blocks[0][0].weight[0, 0].item()


class Late(LightningModule):
    """Builds its blocks in configure_model."""

    def configure_model(self):
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))


class Data(LightningDataModule):
    """Random rows."""

    def __init__(self, size: int = 8):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(torch.randn(self.size, 8), batch_size=4)

    val_dataloader = train_dataloader


class Testing(Data):
    """Has data for a test, too."""

    test_dataloader = Data.train_dataloader


class Noted(Callback):
    """Keeps what it saw."""

    seen: ClassVar[list] = []

    def __init__(self, note: str = "here"):
        self.note = note

    def on_train_end(self, trainer, pl_module):
        Noted.seen.append((self.note, trainer, pl_module))


class Telling(Callback):
    """Prints how far each process has trained."""

    def __init__(self, of: str):
        self.of = of

    def on_train_end(self, trainer, pl_module):
        where = f"step {trainer.global_step} rank {trainer.global_rank} of {trainer.world_size}"
        print(f"TRAINED {self.of} {where}\n", end="", flush=True)  # noqa: T201


class Replacing(SingleDeviceStrategy):
    """Replaces every parameter in setup, as sharding does, before optimizers are made."""

    def __init__(self):
        super().__init__(device="cpu")

    def setup(self, trainer):
        for module in self.lightning_module.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        super().setup(trainer)


class Unannotated(Toy):
    """Says of its width neither what it is nor what it is by default."""

    def __init__(self, wide, act="gelu"):
        super().__init__(width=8 if wide is None else wide)


class OtherPart(Part):
    """Another one."""


class Plain(Toy):
    """Takes nothing."""

    def __init__(self):
        super().__init__()
