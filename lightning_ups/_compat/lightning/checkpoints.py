"""Finds checkpoints for ``ckpt_path="last"``, and rolls back to a checkpoint within a fit."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ups._compat.patches import applied

_UNTIL_THE_END = ExitStack()  # until the process ends


def last_checkpoints(trainer: Trainer) -> set[str]:
    """Return the checkpoints of which Lightning would take the newest. If there is none, it warns."""
    found = {path for path in _on_exception(trainer) if get_filesystem(path).exists(path)}
    for callback in _savers(trainer):
        found |= callback._find_last_checkpoints(trainer)
    return found


def checkpoint_folders(trainer: Trainer) -> dict[Path, bool]:
    """Map each directory in which Lightning looks for the last checkpoint to whether one is saved there."""
    found = {Path(path).parent: True for path in _on_exception(trainer)}
    for callback in _savers(trainer):
        folder = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if "://" not in folder:
            found[Path(folder)] = found.get(Path(folder), False) or bool(callback.save_last)
    return found


def names_of_checkpoints(callbacks: Iterable[Any]) -> list[str]:
    """Return the names that each ModelCheckpoint gives to its checkpoints, before numbers are filled in."""
    savers = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
    last = {each.CHECKPOINT_NAME_LAST for each in savers if each.save_last}
    return sorted(last | {each.filename or "{epoch}-{step}" for each in savers if each.save_top_k != 0})


def own_folder(trainer: Trainer, callback: Any, place: Path) -> str:
    """Return how to give this run its own folder, where ``callback`` would save to ``place``."""
    root, logger = Path(trainer.default_root_dir), trainer.logger
    if logger is None and place == root / "checkpoints":
        own = f"{root}-2"
        return f"Use Trainer(default_root_dir={own!r}), or --trainer.default_root_dir {shlex.quote(own)}."
    if logger is not None and place.parent.parent == Path(logger.save_dir or root, str(logger.name)):
        return f"Start again: {type(logger).__name__} takes the next version, unless it is given one."
    name, own = type(callback).__name__, f"{place.absolute()}-2"
    return f"Use {name}(dirpath={own!r}), or --trainer.callbacks.{name}.dirpath {shlex.quote(own)}."


@cache
def ask_strategy_for_last() -> None:
    """Let Lightning ask a strategy with ``find_last_checkpoint`` what ``ckpt_path="last"`` refers to.

    Lightning looks for it before any hook of a callback or a strategy, and takes the newest path, even if incomplete.
    """
    target = "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector._parse_ckpt_path"
    _UNTIL_THE_END.enter_context(applied(target, _asking_strategy))


def _asking_strategy(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def parse(self: Any, state_fn: TrainerFn, ckpt_path: Any, **options: Any) -> Any:
        find = getattr(self.trainer.strategy, "find_last_checkpoint", None)
        if find is None or not _means_last(self, state_fn, ckpt_path):
            return stock(self, state_fn, ckpt_path, **options)
        found = find(self.trainer)
        if found is None and last_checkpoints(self.trainer):
            return None  # all are incomplete; the strategy has warned
        return stock(self, state_fn, ckpt_path if found is None else str(found), **options)

    return parse


def _means_last(connector: Any, state_fn: TrainerFn, ckpt_path: Any) -> bool:
    if ckpt_path is not None or state_fn != TrainerFn.FITTING or not _on_exception(connector.trainer):
        return ckpt_path == "last"
    return connector._hpc_resume_path is None  # the checkpoint of a requeued job comes first


def checkpoints_beside(trainer: Trainer) -> list[Path]:
    """Return the checkpoints, oldest first, that runs with the same loggers left in their folders."""
    folders = {
        Path(each.save_dir, str(each.name)) for each in trainer.loggers if each.save_dir and each.name is not None
    }
    return _by_age(path for folder in folders for path in folder.glob("*/checkpoints/*.ckpt"))


def checkpoints_in_dirpath(trainer: Trainer) -> list[Path]:
    """Return the checkpoints, oldest first, in each ``dirpath`` that is set for a ModelCheckpoint of this run."""
    folders = {Path(each.dirpath) for each in _savers(trainer) if each.dirpath and "://" not in str(each.dirpath)}
    return _by_age(path for folder in folders for path in folder.glob("*.ckpt"))


def kept_checkpoints(trainer: Trainer) -> list[Path]:
    """Return the checkpoints, oldest first, that the callbacks of this run have written and kept."""
    callbacks = _savers(trainer)
    names = {name for each in callbacks for name in (each.last_model_path, each.best_model_path, *each.best_k_models)}
    return _by_age(path for name in sorted(names | _on_exception(trainer)) if name and (path := Path(name)).exists())


def why_none_written(trainer: Trainer) -> str | None:
    """Return why the callbacks of a finished fit wrote no checkpoint; None if there is one, or none is wanted."""
    callbacks = [each for each in _savers(trainer) if each.save_top_k != 0]
    if not callbacks or any(each.best_model_path or each.last_model_path or each.best_k_models for each in callbacks):
        return None
    logged = trainer.callback_metrics
    unknown = [each for each in callbacks if each.monitor not in (None, "epoch", "step", *logged)]
    if unknown:
        wants = f"{type(unknown[0]).__name__} monitors {unknown[0].monitor!r}"
        return f"none: {wants}, which the run did not log. Logged: {', '.join(logged) or 'nothing'}."
    steps = [each._every_n_train_steps for each in callbacks if each._every_n_train_steps]
    if steps and min(steps) > trainer.global_step:
        when, cure = f"at step {min(steps)}", f"every_n_train_steps={max(trainer.global_step, 1)} or fewer"
    else:
        when, cure = "after a validation or an epoch", "a smaller val_check_interval, or every_n_train_steps"
    name = type(callbacks[0]).__name__
    return f"none: {name} saves {when}, and the run ended at step {trainer.global_step}. Use {cure}."


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _on_exception(trainer: Trainer) -> set[str]:
    return {call.ckpt_path for call in trainer.callbacks if isinstance(call, OnExceptionCheckpoint)}  # type: ignore[attr-defined]


def _by_age(paths: Iterable[Path]) -> list[Path]:
    # Of two that were written at once, the one named last.
    return sorted(paths, key=lambda path: (path.stat().st_mtime, path.name.startswith("last")))


@contextmanager
def asked_weights_only(trainer: Any) -> Iterator[list[bool | None]]:
    """Yield a list that receives the argument ``weights_only`` of the next ``fit``, which Lightning does not store."""
    asked: list[bool | None] = []

    def noting(stock: Callable[..., None]) -> Callable[..., None]:
        def resume_start(*args: Any, **options: Any) -> None:
            asked.append(signature(stock).bind(*args, **options).arguments.get("weights_only"))
            stock(*args, **options)

        return resume_start

    target = "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start"
    with applied(target, noting, owner=trainer._checkpoint_connector):
        yield asked


def roll_back(trainer: Any, path: Path, *, weights_only: bool | None = False) -> None:
    """Restore what the steps since the checkpoint at ``path`` have changed. A collective.

    The run continues with the next batch, at the step count of the checkpoint. Callbacks keep their state.

    Args:
        trainer: A Trainer in a fit.
        path: A complete checkpoint.
        weights_only: As for ``Trainer.fit``. Use False for a checkpoint that this run has written.
    """
    connector = trainer._checkpoint_connector
    connector.resume_start(str(path), weights_only=weights_only)
    connector.restore_model()
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    _restore_progress(trainer, connector._loaded_checkpoint["loops"]["fit_loop"])
    connector.resume_end()
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _restore_progress(trainer: Any, saved: dict[str, Any]) -> None:
    # Of the loops, restore only step counts: epochs and batches are the position in the data.
    epoch_loop = trainer.fit_loop.epoch_loop
    steps = epoch_loop.automatic_optimization.optim_progress
    steps.load_state_dict(saved["epoch_loop.automatic_optimization.optim_progress"])
    epoch_loop._batches_that_stepped = saved["epoch_loop.state_dict"].get("_batches_that_stepped", trainer.global_step)
