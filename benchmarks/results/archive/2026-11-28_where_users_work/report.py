import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from net import Data, Net

from lightning_ups.callbacks import TrainingReport


class Logging(Net):
    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("loss/train", loss)
        self.log("train_norm", loss.sqrt())
        self.logger.experiment.add_image("drawn", torch.rand(3, 8, 8), self.global_step)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss/val", self.layers(batch).square().mean())


torch.manual_seed(0)
trainer = L.Trainer(
    max_epochs=3,
    log_every_n_steps=1,
    logger=TensorBoardLogger("logs"),
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(monitor="loss/val"), TrainingReport()],
)
trainer.fit(Logging(), Data())
