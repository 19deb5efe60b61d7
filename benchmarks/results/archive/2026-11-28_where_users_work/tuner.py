import lightning as L
from lightning.pytorch.tuner import Tuner
from net import Data, Net

from lightning_ups.callbacks import RunManifest, TrainingReport

trainer = L.Trainer(max_epochs=2, callbacks=[RunManifest(), TrainingReport()], enable_progress_bar=False)
model, data = Net(), Data()
Tuner(trainer).lr_find(model, data, num_training=20)
Tuner(trainer).scale_batch_size(model, datamodule=data, max_trials=2, steps_per_trial=2)
trainer.fit(model, data)
