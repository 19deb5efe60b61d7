import lightning as L
from blocks import Blocks
from net import Data

from lightning_ups.callbacks import ActivationCheckpoint, Compile

trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Compile(backend="aot_eager"), ActivationCheckpoint(save="matmuls")],
)
trainer.fit(Blocks(), Data())
