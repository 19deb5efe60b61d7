"""Where Lightning's loops hand what was logged to the loggers."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars

__all__ = ["connector", "is_row_of_step", "remember", "to_scalar"]


def connector(trainer: Any) -> Any:
    """Return the object by whose ``log_metrics(metrics, step=None)`` every loop logs."""
    return trainer._logger_connector


def is_row_of_step(trainer: Any) -> bool:
    """Return whether what a loop logs now is of one step of training, and not of an epoch or of an evaluation."""
    return bool(trainer.training) and trainer._logger_connector._first_loop_iter is not None


def remember(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """Let ``trainer.logged_metrics`` have ``metrics``, as it has what is logged."""
    trainer._logger_connector._logged_metrics.update(metrics)


def to_scalar(value: Any) -> Any:
    """Return a tensor's number as loggers get it, and what is none as it is.

    Raises:
        ValueError: If a tensor has several.
    """
    return convert_tensors_to_scalars(value)
