"""What Lightning finds for ``ckpt_path="last"``, and what it does not look for."""

from collections.abc import Iterable
from pathlib import Path

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

__all__ = ["checkpoints_beside", "kept_checkpoints", "last_checkpoints"]


def last_checkpoints(trainer: Trainer) -> set[str]:
    """Return those of which Lightning would take the newest. Where there is none, it warns and goes on without."""
    found = {path for path in _on_exception(trainer) if get_filesystem(path).exists(path)}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            found |= callback._find_last_checkpoints(trainer)
    return found


def checkpoints_beside(trainer: Trainer) -> list[Path]:
    """Return the checkpoints, oldest first, that runs with the same loggers left in folders of their own."""
    folders = {
        Path(each.save_dir, str(each.name)) for each in trainer.loggers if each.save_dir and each.name is not None
    }
    return _by_age(path for folder in folders for path in folder.glob("*/checkpoints/*.ckpt"))


def kept_checkpoints(trainer: Trainer) -> list[Path]:
    """Return the checkpoints, oldest first, that the callbacks of this run have written and kept."""
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    names = {name for each in callbacks for name in (each.last_model_path, each.best_model_path, *each.best_k_models)}
    return _by_age(path for name in sorted(names | _on_exception(trainer)) if name and (path := Path(name)).exists())


def _on_exception(trainer: Trainer) -> set[str]:
    return {call.ckpt_path for call in trainer.callbacks if isinstance(call, OnExceptionCheckpoint)}  # type: ignore[attr-defined]


def _by_age(paths: Iterable[Path]) -> list[Path]:
    # Of two that were written at once, the one that is called the last.
    return sorted(paths, key=lambda path: (path.stat().st_mtime, path.name.startswith("last")))
