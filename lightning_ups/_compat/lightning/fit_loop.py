"""Private state of Lightning's fit loop: its position in the data. Does not import Lightning."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_ups._compat.patches import applied


def follow_loaders(
    trainer: Any,
    *,
    before: Callable[[list[Any]], list[Any]],
    epoch: Callable[[], list[bool] | None],
    again: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Call ``before`` with the training loaders when Lightning has created them, and ``epoch`` when they are iterated.

    Args:
        trainer: A Trainer before its fit loop runs.
        before: Receives the loaders as processed by Lightning, before an iterator exists, and returns their
            replacements.
        epoch: Called when the loaders are iterated again; may return, for each loader, whether it was exhausted earlier
            in this epoch.
        again: Returns, when the fit loop begins, whether ``before`` must be called again: a strategy that loads
            checkpoints after ``configure_optimizers`` does so after ``estimated_stepping_batches`` created the loaders.

    Returns:
        A function that undoes it.
    """
    fit_loop, undo = trainer.fit_loop, ExitStack()
    given: list[Any] = []

    def following(stock: Callable[..., None]) -> Callable[..., None]:
        def load_states(*args: Any, **kwargs: Any) -> None:
            combined = fit_loop._combined_loader
            undo.callback(setattr, combined, "__class__", type(combined))
            combined.__class__ = _announcing(type(combined), epoch)
            stock(*args, **kwargs)
            given[:] = combined.flattened
            combined.flattened = before(given[:])

        return load_states

    def repeating(stock: Callable[[], None]) -> Callable[[], None]:
        def setup_data() -> None:
            known = fit_loop._combined_loader
            stock()
            if known is not None and known is fit_loop._combined_loader and again():
                known.flattened = before(given[:])
                iter(fit_loop._data_fetcher)  # as at the end of the stock method

        return setup_data

    # The last call between the creation of the loaders and their use.
    target = "lightning.pytorch.loops.fit_loop:_FitLoop._load_combined_loader_states"
    undo.enter_context(applied(target, following, owner=fit_loop))
    undo.enter_context(applied("lightning.pytorch.loops.fit_loop:_FitLoop.setup_data", repeating, owner=fit_loop))
    return undo.close


def _announcing(kind: type, epoch: Callable[[], list[bool] | None]) -> type:
    def iterate(self: Any) -> Any:
        restarted = epoch()
        result = kind.__iter__(self)  # type: ignore[attr-defined]
        if restarted and hasattr(self._iterator, "_consumed"):
            self._iterator._consumed = restarted
        return result

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})


def batches_taken(trainer: Any) -> int:
    """Return the number of batches of this epoch whose step is done; a step in progress does not count."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.processed


def is_within_step(trainer: Any) -> bool:
    """Return whether a batch's step is in progress."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.ready > current.processed


def set_batches_taken(trainer: Any, number: int) -> None:
    """Set the loop's count to ``number`` consumed batches of this epoch."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    difference = number - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, max(0, getattr(current, name) + difference))


def begin_epoch_anew(trainer: Any) -> None:
    """Reset the loop's batch count if it was saved at the end of an epoch.

    Lightning only does so if it knows the number of batches, and if the next epoch has no more of them; otherwise it
    assumes that the next epoch is also over, or has begun.
    """
    epochs, most = trainer.fit_loop.epoch_progress, trainer.fit_loop.max_epochs
    ended = trainer.fit_loop.restarted_mid_epoch and epochs.current.ready == epochs.current.processed
    if ended and (most == -1 or epochs.current.processed < most):
        # Lightning ends that epoch and begins the next without counting it: a later save would look like one at an end.
        epochs.increment_ready()
        epochs.increment_started()
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if trainer.fit_loop.max_batches > progress.current.ready:
        current = progress.current
        current.completed -= current.ready  # -1 if the loop was saved before it counted the last batch; it does so now
        current.ready = current.started = current.processed = 0
        progress.is_last_batch = False


def end_restart_after_epoch(trainer: Any) -> None:
    """Let a loop that was saved at the end of an epoch begin the next one; call before the loop is reset.

    Lightning does so unless ``max_steps`` is given; then it trains one more batch of the epoch that has ended. If
    ``max_steps`` or ``should_stop`` ended the epoch early, Lightning has counted it, and it goes on here as one that
    was not.
    """
    epochs = trainer.fit_loop.epoch_progress
    if not epochs.current.processed or not epochs.current.ready == epochs.current.started == epochs.current.processed:
        return
    if is_epoch_over(trainer):
        _end_restart(trainer.fit_loop)
        return
    for progress in (epochs.current, epochs.total):
        progress.processed -= 1
        progress.completed = min(progress.completed, progress.processed)


def _end_restart(loop: Any) -> None:
    loop._restarting = False  # the setter would set it to True again
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            _end_restart(inner)


def counts_last_batch(trainer: Any) -> bool:
    """Return whether the loop has counted its last batch as completed; if so, it next begins a new epoch."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return total.completed == total.processed


def is_epoch_over(trainer: Any) -> bool:
    """Return whether the step of the epoch's last batch is done."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch) and not is_within_step(trainer)


def fetches_in_step(trainer: Any) -> bool:
    """Return whether ``training_step(dataloader_iter)`` takes batches itself: hooks before it get an older one."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def in_accumulation(trainer: Any) -> bool:
    """Return whether gradients of earlier batches wait for the optimizer step."""
    return batches_taken(trainer) > 0 and bool(trainer.fit_loop._should_accumulate())


def is_before_validation(trainer: Any) -> bool:
    """Return whether a validation comes next, after a step; a run resumed from here would skip it."""
    epoch_loop, total = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.batch_progress.total
    just_stepped = total.ready == total.processed == total.completed + 1
    return just_stepped and epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def follows_metric(trainer: Any) -> bool:
    """Return whether a scheduler depends on a metric; a resumed run skips its next step, without the metric."""
    return any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)


def reloads_unlike(trainer: Any) -> bool:
    """Return whether a run resumed from here would reload its loaders at other times than this one."""
    every = trainer.reload_dataloaders_every_n_epochs
    return every > 1 or (every == 1 and is_epoch_over(trainer))


def restarted_loaders(trainer: Any) -> list[bool]:
    """Return, for each loader, whether it was exhausted in this epoch and started again."""
    iterator = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    return list(getattr(iterator, "_consumed", []))


def logged_step(trainer: Any) -> int:
    """Return the step number that Lightning gives to loggers for the step that is ending."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_logging_step(trainer: Any) -> bool:
    """Return whether Lightning logs the step that is ending."""
    every = trainer.log_every_n_steps
    return every > 0 and (logged_step(trainer) + 1) % every == 0


def leaves_no_files(trainer: Any) -> bool:
    """Return whether this is a trial: ``fast_dev_run``, ``barebones``, a sanity check, or Lightning's Tuner."""
    # The Tuner starts a fit whose first callback runs the trials, and then ends it.
    tunes = any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)
    return bool(trainer.fast_dev_run or trainer.barebones or trainer.sanity_checking or tunes)


def keep_resumed_checkpoint(trainer: Any) -> None:
    """Let no ModelCheckpoint save the step again from which a run resumes.

    Lightning forgets that this step was saved. While gradients accumulate, it would replace the checkpoint by one that
    is saved within the next step.
    """
    for each in trainer.checkpoint_callbacks:
        if vars(each).get("_last_global_step_saved") == 0:
            each._last_global_step_saved = trainer.global_step
