"""What Lightning's loop hands to ``on_train_batch_end``, as far as it tells what a step did."""

from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["was_skipped"]


def was_skipped(module: LightningModule, outputs: Any) -> bool:
    """Return whether ``training_step`` asked to skip the batch, by returning None.

    One that optimizes itself may return None always: before its first step nothing tells whether it did any work.
    """
    if not module.automatic_optimization:
        return not outputs and module.trainer.global_step == 0
    return not outputs or (isinstance(outputs, dict) and outputs.get("loss") is None)
