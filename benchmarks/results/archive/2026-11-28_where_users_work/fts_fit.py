import lightning as L
from blocks import Blocks, Varying
from finetuning_scheduler import FinetuningScheduler

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.precision import BF16Precision

trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=4,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
    plugins=[BF16Precision()],
    callbacks=[
        FinetuningScheduler(max_depth=1, epoch_transitions_only=True, ft_schedule="phases.yaml"),
        Compile(backend="aot_eager"),
        ActivationCheckpoint(save="matmuls"),
    ],
)
trainer.fit(Blocks(), Varying())
print("parameters in the optimizer:", sum(len(group["params"]) for group in trainer.optimizers[0].param_groups))
