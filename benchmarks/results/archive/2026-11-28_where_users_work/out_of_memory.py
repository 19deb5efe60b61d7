import lightning as L
import torch
from blocks import Blocks, Varying

from lightning_ups.callbacks import MemoryForensics


class Full(L.Callback):
    def on_before_optimizer_step(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")  # what torch raises on a GPU


options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", callbacks=[MemoryForensics(), Full()], **options)
trainer.fit(Blocks(depth=32), Varying())
