"""Vision: a small convolutional network, compiled, in bfloat16. `python examples/vision.py` needs no download."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ups import BF16Precision, Compile


class Classifier(L.LightningModule):
    """Tell bright discs from squares."""

    def __init__(self):
        super().__init__()
        layers = [layer for i, o in ((1, 32), (32, 64), (64, 64)) for layer in (nn.Conv2d(i, o, 3, 2, 1), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def shapes(count: int = 1024) -> TensorDataset:
    """Return noisy images of 32 x 32 pixels, each with a disc or a square at a random place."""
    labels = torch.randint(2, (count,))
    away = torch.arange(32) - torch.randint(8, 24, (count, 2, 1))
    x, y = away[:, :1, :].abs(), away[:, 1:, :].abs().transpose(1, 2)
    discs, squares = x**2 + y**2 < 40, torch.maximum(x, y) < 6
    images = torch.where(labels[:, None, None] == 0, discs, squares).float() + 0.1 * torch.randn(count, 32, 32)
    return TensorDataset(images[:, None], labels)


L.seed_everything(0)
trainer = L.Trainer(max_steps=200, max_epochs=-1, plugins=[BF16Precision()], callbacks=[Compile(scope="model")])
trainer.fit(Classifier(), DataLoader(shapes(), batch_size=64, shuffle=True))
print(f"loss: {trainer.callback_metrics['loss']:.3f}, guessing: 0.693")
