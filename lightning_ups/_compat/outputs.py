"""What Lightning's loop hands to ``on_train_batch_end``, as far as it tells what a step did."""

from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["was_skipped"]


def was_skipped(module: LightningModule, outputs: Any, *, began_at: int) -> bool:
    """Return whether ``training_step`` asked to skip the batch, by returning None.

    One that optimizes itself may return None always: that it did some work is told by an optimizer's step.

    Args:
        module: The module that trains.
        outputs: What the hook was given.
        began_at: The global step when the batch began.
    """
    if not module.automatic_optimization:
        return not outputs and module.trainer.global_step == began_at
    return not outputs or (isinstance(outputs, dict) and outputs.get("loss") is None)
