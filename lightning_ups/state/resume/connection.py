"""Connects a `Resumption` to the fit loop of a Trainer."""

import warnings
from typing import Any, cast

import torch.distributed as dist

from lightning_ups._compat.lightning.fit_loop import (
    batches_taken,
    begin_epoch_anew,
    counts_last_batch,
    end_restart_after_epoch,
    follow_loaders,
    follows_metric,
    in_accumulation,
    is_before_validation,
    is_epoch_over,
    is_within_step,
    reloads_unlike,
    restarted_loaders,
    set_batches_taken,
)
from lightning_ups.state.resume.resumption import OnUnreplayable, Progress, Resumption

__all__ = ["Connection"]


class Connection:
    """Follows the training data of a Trainer, from before its fit loop runs until `close`.

    Args:
        trainer: A Lightning Trainer that is about to fit.
        on_unreplayable: See `Resumption`.
    """

    def __init__(self, trainer: Any, *, on_unreplayable: OnUnreplayable) -> None:
        data = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        self._trainer = trainer
        self._resumption = Resumption(
            on_unreplayable=on_unreplayable, rank=data["rank"], num_ranks=data["num_replicas"]
        )
        self._undo = follow_loaders(trainer, before=self._follow, epoch=self._resumption.epoch)
        self._positioned = False  # whether a checkpoint with a position was loaded
        self._silence: Any = None  # the warnings filter that is added here

    def state(self) -> dict[str, Any]:
        """Return the state of all ranks on rank 0, and nothing elsewhere. A collective."""
        if is_before_validation(self._trainer):
            reason = "Lightning leaves out a validation that follows the step after which it was saved"
            self._resumption.name(reason, cure="Save after another step, or when validation is over.")
        self._name_what_lightning_changes()
        own = self._resumption.state(
            Progress(
                taken=batches_taken(self._trainer),
                epoch_over=is_epoch_over(self._trainer),
                within_step=is_within_step(self._trainer),
                accumulating=in_accumulation(self._trainer),
                restarted=restarted_loaders(self._trainer),
            )
        )
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {"ranks": [own]}
        gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered, dst=0)  # in training's group: a background save uses its own
        return {"ranks": gathered} if gathered is not None else {}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned on rank 0; every rank has read it."""
        process = dist.get_rank() if dist.is_initialized() else 0
        if not self._resumption.is_own(state["ranks"], process=process):
            self._positioned = True
            self._resumption.load(state["ranks"], process=process)

    def begin(self) -> None:
        """Record that training begins.

        Raises:
            ValueError: If a run resumed from any checkpoint of this run could not be exact, and that must be refused.
        """
        if self._resumption.refuses:  # a warning is given when a checkpoint is saved
            self._name_what_lightning_changes()
        if self._resumption.begin():
            begin_epoch_anew(self._trainer)

    def begin_epoch(self) -> None:
        """Restore the random state, if an epoch begins now."""
        self._resumption.begin_epoch()

    def close(self) -> None:
        """Restore the trainer, its loaders and the warnings filters."""
        self._undo()
        if self._silence in warnings.filters:  # all filters may have been restored before
            cast("list[Any]", warnings.filters).remove(self._silence)
        self._silence = None
        self._resumption.release()

    def _name_what_lightning_changes(self) -> None:
        if reloads_unlike(self._trainer):
            reason = "Lightning makes the loaders that are made anew every so many epochs at other times"
            self._resumption.name(reason, cure="Leave reload_dataloaders_every_n_epochs at 0.")
        if follows_metric(self._trainer):
            reason = "Lightning leaves out the next step of the schedule that follows a metric"
            self._resumption.name(reason, cure="Use a schedule that follows the number of steps or epochs.")

    def _follow(self, loaders: list[Any]) -> list[Any]:
        loaded, over = self._trainer.fit_loop.epoch_loop.restarting, is_epoch_over(self._trainer)
        if loaded:
            end_restart_after_epoch(self._trainer)
        loaded = loaded and not self._positioned
        counted = batches_taken(self._trainer) if loaded and not over else 0
        at_end = loaded and over and not counts_last_batch(self._trainer)
        stand_ins = self._resumption.follow(loaders, counted=counted, at_end=at_end)
        if self._resumption.taken is not None:
            set_batches_taken(self._trainer, self._resumption.taken)
            self._silence_lightning()
        return stand_ins

    def _silence_lightning(self) -> None:
        # It says that the loaders cannot be resumed, which is no longer true.
        before = [*warnings.filters]
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        if warnings.filters[0] not in before:  # the user may have added the same one
            self._silence = warnings.filters[0]
