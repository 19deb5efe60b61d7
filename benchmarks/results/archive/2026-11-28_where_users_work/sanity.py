import lightning as L
from net import Data, Net

from lightning_ups.callbacks import RunManifest, TrainingReport


class Wrong(Net):
    def validation_step(self, batch, batch_idx):
        raise ValueError("a mistake in validation_step")


trainer = L.Trainer(callbacks=[RunManifest(), TrainingReport()], enable_progress_bar=False)
trainer.fit(Wrong(), Data())
