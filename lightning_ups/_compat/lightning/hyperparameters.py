"""The hyperparameters that Lightning logs by itself, whose switch is a private name of the module."""

from typing import Any

from lightning.pytorch import Trainer

__all__ = ["logged_hyperparameters"]


def logged_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning hands to the loggers when a fit starts: the module's, and the datamodule's over them."""
    found: dict[str, Any] = {}
    for holder in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if holder is not None and holder._log_hyperparams:
            found |= holder.hparams_initial
    found.pop("_class_path", None)  # of LightningCLI's own
    return found
