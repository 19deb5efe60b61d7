"""Check before a run what the Trainer would notice late or not at all: checkpoint, data, optimizer, folder."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups._compat.lightning.checkpoints import (
    checkpoints_beside,
    checkpoints_in_dirpath,
    last_checkpoints,
)
from lightning_ups.config.output import note, shell_word
from lightning_ups.config.suggestions import suggest_file
from lightning_ups.state.checkpoint import check_file, is_complete, newest_within

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def check_checkpoint_exists(given: Any) -> None:
    """Refuse a ``ckpt_path`` that is empty or does not exist."""
    if given == "":
        raise ValueError(
            "ckpt_path is empty, as from an unset shell variable. Give a file or a folder, or leave it out."
        )
    path = str(given or "last")
    if path in ("best", "last", "hpc") or "://" in path or path.startswith("registry") or Path(path).exists():
        return
    suggestion = suggest_file(path, endings=(".ckpt",))
    raise FileNotFoundError(f"ckpt_path {path!r} does not exist (looked up from {Path.cwd()}). {suggestion}")


def check_checkpoint_fits_strategy(given: Any, strategy: Strategy) -> None:
    """Refuse a damaged file, and a folder for a strategy that reads files."""
    if not given or type(strategy).load_checkpoint is not Strategy.load_checkpoint:
        return
    if (path := Path(given)).is_file():
        check_file(path)
    elif path.is_dir():
        cure = "Use trainer.strategy: fsdp2, or convert it: python -m lightning_ups export"
        cure += f" --checkpoint {path} --output one.ckpt --format torch"
        if not is_complete(path):
            inside = newest_within(path)
            cure = f"Did you mean {str(inside)!r}?" if inside else suggest_file(path, endings=(".ckpt",))
        raise ValueError(f"{path} is a folder, but {type(strategy).__name__} reads single files. {cure}")


def check_last_checkpoint(given: Any, trainer: Trainer, command: str) -> None:
    """Refuse ``ckpt_path: last`` if there is none and the command would use untrained weights; a fit prints a line."""
    find = getattr(trainer.strategy, "find_last_checkpoint", last_checkpoints)
    if given != "last" or find(trainer):
        return
    path, described = _newest_checkpoint(trainer)
    missing = "ckpt_path 'last' finds no last.ckpt where the ModelCheckpoint of this run writes"
    if command == "fit":
        note(f"{missing}. Training starts at step 0.{described}")
        return
    raise FileNotFoundError(f"{missing}, and {command} would use untrained weights. Give the path: --ckpt_path {path}")


def check_best_checkpoint(given: Any, trainer: Trainer) -> None:
    """Refuse ``ckpt_path: best`` unless a fit of this process has saved a checkpoint: the Trainer knows no other."""
    if given == "best" and not getattr(trainer.checkpoint_callback, "best_model_path", None):
        kept = [shell_word(path) for path in checkpoints_in_dirpath(trainer) if not path.name.startswith("last")]
        _, described = _newest_checkpoint(trainer)
        if kept:
            described = f" In the dirpath of ModelCheckpoint: --ckpt_path {' or '.join(kept[-5:])}"
        raise ValueError(
            f"ckpt_path 'best' is the best checkpoint of a fit in the same process. Give its path instead.{described}"
        )


def _newest_checkpoint(trainer: Trainer) -> tuple[str, str]:
    """Return the newest checkpoint, of this configuration's ``dirpath`` if there is one, and a sentence about it."""
    places = {"in the dirpath of ModelCheckpoint": checkpoints_in_dirpath, "of another run": checkpoints_beside}
    for where, find in places.items():
        if found := find(trainer):
            path = shell_word(found[-1])
            return path, f" The newest {where}: --ckpt_path {path}"
    return "FILE", ""


def check_data(command: str, module: LightningModule, datamodule: Any) -> None:
    """Refuse a run without a data loader."""
    loader = _LOADERS.get(command)
    if loader is None or datamodule is not None or is_overridden(loader, module):
        return
    raise ValueError(
        f"There is no data for {command}: the section 'data' is missing, and {type(module).__name__} has no {loader}."
        " Name a LightningDataModule: class_path below 'data', or --data CLASS."
    )


def check_scheduler_has_optimizer(optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
    """Refuse a section ``lr_scheduler`` without the section ``optimizer``: it would have no effect."""
    for key, chosen in schedulers.items():
        if chosen is not None and optimizers and not any(optimizers.values()):
            needed = next(iter(optimizers))
            raise ValueError(
                f"The section {key!r} has no effect without {needed!r}. Add the section {needed!r}, or create the"
                " scheduler in configure_optimizers."
            )


def expanded_folder(folder: str) -> str:
    """Return ``trainer.default_root_dir`` with environment variables and ~ replaced: not all of Lightning does so."""
    if "://" in folder:
        return folder
    for name in re.findall(r"\$(\w+|\{[^}]*\})", folder, flags=re.ASCII):
        if (variable := name.strip("{}")) not in os.environ:
            raise ValueError(f"trainer.default_root_dir is {folder!r}, but the variable {variable} is not set.")
    return os.path.expanduser(os.path.expandvars(folder))


def keeps_predictions(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether anything takes the outputs of ``predict_step``."""
    if any(isinstance(each, BasePredictionWriter) for each in trainer.callbacks):  # type: ignore[attr-defined]
        return True
    others = [each for each in trainer.callbacks if not type(each).__module__.startswith(("lightning", "pytorch_l"))]  # type: ignore[attr-defined]
    hooks = ("on_predict_batch_end", "on_predict_epoch_end")
    return any(is_overridden(hook, part) for hook in hooks for part in (module, *others))
