import lightning as L
import torch
from blocks import Blocks
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.precision import BF16Precision


class Measured(Blocks):
    def __init__(self):
        super().__init__()
        self.errors = MetricCollection({"squared": MeanSquaredError(), "absolute": MeanAbsoluteError()})

    def training_step(self, batch, batch_idx):
        predicted = self(batch).squeeze(-1)
        self.log_dict(self.errors(predicted.detach().float(), batch.mean(-1)), on_step=True)
        return predicted.square().mean()


for options in (
    {"precision": "bf16-mixed"},
    {"plugins": [BF16Precision()], "callbacks": [Compile(backend="aot_eager"), ActivationCheckpoint(save="matmuls")]},
):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8, 16), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Measured(), loader)
    print({name: value.item() for name, value in trainer.callback_metrics.items()})
