"""A module, its data and a callback as research code has them: of pytorch_lightning."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8), batch_size=4)


class Seen(Callback):
    ended = 0

    def on_train_end(self, trainer, pl_module):
        Seen.ended += 1
