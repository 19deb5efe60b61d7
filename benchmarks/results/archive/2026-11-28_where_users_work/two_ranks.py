import lightning as L
from lightning.pytorch.loggers import WandbLogger
from net import Data, Net

from lightning_ups.callbacks import RunManifest, TrainingReport

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=WandbLogger(project="try", offline=True),
        callbacks=[RunManifest(), TrainingReport()],
        enable_progress_bar=False,
    )
    trainer.fit(Net(), Data())
