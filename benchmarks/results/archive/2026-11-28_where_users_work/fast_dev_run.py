import lightning as L
from net import Data, Net

from lightning_ups.callbacks import RunManifest, TrainingReport

trainer = L.Trainer(fast_dev_run=2, callbacks=[RunManifest(), TrainingReport()], enable_progress_bar=False)
trainer.fit(Net(), Data())
