import lightning as L
from blocks import Blocks, Varying

from lightning_ups.callbacks import Compile

trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[Compile()])
trainer.fit(Blocks(), Varying())
