import lightning as L
import litdata
import torch
from blocks import Blocks

from lightning_ups.callbacks import ActivationCheckpoint, Compile, ExactResume
from lightning_ups.precision import BF16Precision


def item(index):
    return torch.full((8, 16), index / 32)


if __name__ == "__main__":
    litdata.optimize(item, list(range(32)), output_dir="items", chunk_bytes="4KB", num_workers=1)
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("items"), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[BF16Precision()],
        callbacks=[Compile(backend="aot_eager"), ActivationCheckpoint(save="matmuls"), ExactResume()],
    )
    trainer.fit(Blocks(), loader)
    print("steps:", trainer.global_step, "loss:", trainer.callback_metrics["train_loss"].item())
