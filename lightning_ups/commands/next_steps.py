"""Say where a fit has written its files, and which commands to try next."""

from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups._compat.lightning.checkpoints import kept_checkpoints, why_none_written
from lightning_ups.callbacks import RunManifest
from lightning_ups.config.output import shell_word, short_path
from lightning_ups.config.parser import SavedConfig


def closing_lines(trainer: Trainer, *, program: str, interrupted: bool = False) -> Iterator[str]:
    """Yield the places of logs, checkpoint and manifest, and the next commands for `program`.

    After an interruption this names the newest checkpoint, not the best one, and how to resume from it.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if (interrupted or not checkpoint) and "://" not in checkpoint:
        checkpoint = str(next(reversed(kept_checkpoints(trainer)), ""))
    paths = {
        # Not trainer.log_dir, which is a collective: this runs on rank 0 only.
        "logs": next((logger.log_dir or logger.save_dir for logger in trainer.loggers), None),
        "checkpoint": checkpoint,
        "manifest": _path_of(RunManifest, trainer),
    }
    missing = None if interrupted else why_none_written(trainer)
    if not (any(paths.values()) or interrupted or missing):
        return
    yield ""
    shown = {what: short_path(path) for what, path in paths.items() if path}
    yield from (f"{what:11} {path}" for what, path in shown.items() if path != ".")  # as W&B's logger has it
    if missing:
        yield f"checkpoint  {missing}"
    next_steps = []
    if not interrupted:
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        next_steps = [f"tensorboard --logdir {shell_word(board.root_dir)}" for board in boards]
    config = _path_of(SavedConfig, trainer)
    if checkpoint and config:
        evaluates = not interrupted and is_overridden("validation_step", trainer.lightning_module)
        command = "validate" if evaluates else "fit"
        next_steps.append(f"{program} {command} --config {shell_word(config)} --ckpt_path {shell_word(checkpoint)}")
    if interrupted and not checkpoint:
        next_steps.append("No checkpoint was saved to resume from.")
    title = "resume" if interrupted else "try next"
    yield from (f"{title if index == 0 else '':11} {step}" for index, step in enumerate(next_steps))


def _path_of(kind: type[Callback], trainer: Trainer) -> Path | None:
    return next((each.path for each in trainer.callbacks if isinstance(each, kind)), None)  # type: ignore[attr-defined]
