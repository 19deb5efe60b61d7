"""A classifier of pictures that trains on the outputs of a frozen encoder; `latents.yaml` computes them once.

The module, its data and the encoder are a user's own code: nothing here knows of lightning_ups.
"""

from itertools import pairwise

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of a disc or a square, [1, size, size], at random places that depend on the index alone."""

    def __init__(self, count: int, *, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.seed + index)
        radius = self.size * (0.15 + 0.1 * torch.rand((), generator=random))
        y, x = (torch.rand(2, generator=random) - 0.5) * self.size / 2
        line = torch.arange(self.size) - self.size / 2
        down, across = (line - y)[:, None].abs(), (line - x)[None].abs()
        label = index % 2
        shape = torch.maximum(down, across) if label else (down**2 + across**2).sqrt()
        return (shape < radius).float()[None] + 0.1 * torch.randn(1, self.size, self.size, generator=random), label


class PicturesData(LightningDataModule):
    """Pictures for training and for validation."""

    def __init__(self, count: int = 2048, size: int = 64, batch_size: int = 64) -> None:
        super().__init__()
        self.train = Pictures(count, size=size, seed=0)
        self.val = Pictures(count // 8, size=size, seed=10**6)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the loader for training."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the loader for validation."""
        return DataLoader(self.val, batch_size=self.batch_size)


class Encoder(nn.Module):
    """Random convolutions, in place of a model that was trained on other data; it would load its weights here."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        widths = (1, 16, 32, dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Conv2d(given, made, 5, stride=2) for given, made in pairwise(widths))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return latents [batch, 2 * dim] of pictures [batch, 1, size, size]."""
        for layer in self.layers:
            pictures = F.gelu(layer(pictures))
        return torch.cat([pictures.mean((2, 3)), pictures.std((2, 3))], dim=1)


class Classifier(LightningModule):
    """A linear classifier of latents."""

    def __init__(self, dim: int = 128, lr: float = 3e-2) -> None:
        super().__init__()
        self.layers, self.lr = nn.Sequential(nn.BatchNorm1d(dim), nn.Linear(dim, 2)), lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        latents, labels = batch
        return F.cross_entropy(self.layers(latents), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of correct answers."""
        latents, labels = batch
        self.log("val_accuracy", (self.layers(latents).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
