import lightning as L
import torch
from net import Data
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint


class Net(L.LightningModule):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


for depth in (1, 4):
    callbacks = [ActivationCheckpoint(save="matmuls")]
    trainer = L.Trainer(max_epochs=1, logger=False, callbacks=callbacks, enable_progress_bar=False)
    trainer.fit(Net(depth), Data())
    print(f"depth {depth} is trained")
