import lightning as L
import torch
from torch import nn


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layers(batch)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layers(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
