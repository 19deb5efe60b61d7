import lightning as L
import torch
from torch import nn


class Blocks(L.LightningModule):
    def __init__(self, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, batch):
        for layer in self.layers:
            batch = batch + layer(batch)
        return self.head(batch)

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(batch).square().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Varying(L.LightningDataModule):
    """Batches of several sizes and lengths."""

    def train_dataloader(self):
        batches = [torch.randn(rows, length, 16) for rows, length in ((4, 8), (4, 8), (2, 8), (4, 5), (1, 3))]
        return torch.utils.data.DataLoader(batches, batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
