"""What Lightning finds for ``ckpt_path="last"``."""

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

__all__ = ["last_checkpoints"]


def last_checkpoints(trainer: Trainer) -> set[str]:
    """Return those of which Lightning would take the newest. Where there is none, it warns and goes on without."""
    found = {call.ckpt_path for call in trainer.callbacks if isinstance(call, OnExceptionCheckpoint)}  # type: ignore[attr-defined]
    found = {path for path in found if get_filesystem(path).exists(path)}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            found |= callback._find_last_checkpoints(trainer)
    return found
