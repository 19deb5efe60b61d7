"""The position of a run in its data, and its random numbers, on every rank, and what connects them to a fit loop."""

import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Literal, cast
from uuid import uuid4

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
    keep_resumed_checkpoint,
    reloads_unlike,
    restarted_loaders,
    set_batches_taken,
)
from lightning_ups.state.resume.loader import FollowedLoader
from lightning_ups.transforms.random_state import random_state, restore_random_state, seed_from

RESUME_KEY = "lightning_ups.resume"  # the key in a checkpoint
OnUnreplayable = Literal["warn", "refuse"]
_CURE = "Let the loader have a state_dict, or draw random numbers from the sample's index."


class Resumption:
    """Records this rank's position in its training data, and restores it.

    Args:
        on_unreplayable: ``"warn"`` once, or ``"refuse"``, if something cannot be replayed.
        rank: The rank of this process among those that read different data.
        num_ranks: The number of processes that read different data.
    """

    def __init__(self, *, on_unreplayable: OnUnreplayable, rank: int = 0, num_ranks: int = 1) -> None:
        self._policy, self._rank, self._num_ranks = on_unreplayable, rank, num_ranks
        self._loaders: list[FollowedLoader] = []
        self._saved: dict[str, Any] | None = None
        self._all: list[dict[str, Any]] = []  # of each rank that reads different data
        self._now: dict[str, Any] | None = None  # generators at the time of saving, until they are restored
        self._at_end = False
        self._counted = 0  # batches of this epoch before the first known one
        self._named: set[str] = set()
        self._restarted: list[bool] = []
        # the order of each loader's samples: in this run, and in the saved one
        self._orders: list[tuple[Any, Any]] = []
        self.taken: int | None = None
        self._run, self._is_early = uuid4().hex, False  # the flag: `state` ran before a loaded state was used

    # Following loaders

    def follow(self, loaders: Sequence[Any], *, counted: int = 0, at_end: bool = False) -> list[Any]:
        """Follow ``loaders``, and start them at the loaded position.

        Sets ``taken`` to the number of batches of this epoch that the loop should have consumed, or None if unknown.

        Args:
            loaders: All training loaders.
            counted: The loop's batch count, if a checkpoint without such a state was loaded.
            at_end: Whether that checkpoint was saved at the end of an epoch.

        Returns:
            The objects that identify the loaders: themselves, if they are DataLoaders.

        Raises:
            ValueError: If the number of loaders differs from the loaded state, or if one cannot be replayed and that
                must be refused.
        """
        self.release()
        self._loaders = [FollowedLoader(loader, self) for loader in loaders]
        saved, self._saved, self.taken = self._saved, None, None
        self._counted = counted if saved is None else 0
        if saved is None and (counted or at_end):
            self._at_end = at_end
            self.name(
                "the checkpoint has no position in the data, so data are read from the beginning: it was saved without"
                " exact resuming, or with Trainer.save_checkpoint after fit",
                cure="Save with ModelCheckpoint in a run with exact resuming.",
            )
        if saved is not None:
            self._take_up(saved)
        self._take_up_orders()
        self.review()
        return [loader.stand_in for loader in self._loaders]

    def _take_up(self, saved: dict[str, Any]) -> None:
        over = saved["loaders"] is None
        positions = saved["ends"] if over else saved["loaders"]
        if not positions and not over:
            return  # saved before there was a loader, as in a trial run: from the beginning
        if len(positions) != len(self._loaders):
            raise ValueError(
                f"The checkpoint holds the positions of {len(positions)} training loaders, and there are"
                f" {len(self._loaders)}."
                " A position belongs to one loader, in the order in which they are given."
                " Give the loaders of the run that was saved, or start from its weights alone."
            )
        self._orders = [(loader.order, p.get("order")) for loader, p in zip(self._loaders, positions, strict=True)]
        alike = saved["num_ranks"] == self._num_ranks
        of_all = [[*each] for each in zip(*(state["ends" if over else "loaders"] for state in self._all), strict=True)]
        if over:
            for loader, end, ends in zip(self._loaders, positions, of_all, strict=True):
                loader.take_up_end(end if alike else {**end, "state": loader.divide_states(ends)})
            return
        if not alike:
            ranks = {"ranks_before": saved["num_ranks"], "ranks_now": self._num_ranks}
            positions = [loader.divide(each, **ranks) for loader, each in zip(self._loaders, of_all, strict=True)]
        for loader, position in zip(self._loaders, positions, strict=True):
            if position is not None:
                loader.take_up(position)
        self.taken = saved["taken"] if alike else max((p["given"] for p in positions if p is not None), default=0)
        self._restarted = list(saved["restarted"])

    def _take_up_orders(self) -> None:
        for loader, (found, saved) in zip(self._loaders, self._orders, strict=False):
            if saved is not None and loader.order == found:  # otherwise its creator gives it another seed each time
                loader.take_up_order(saved)

    def epoch(self) -> list[bool] | None:
        """Record that the loaders are iterated again; return which were exhausted before, if known."""
        taking_up = any(loader.taking_up for loader in self._loaders)
        counted, self._counted = self._counted, 0
        for loader in self._loaders:
            loader.begin_epoch(self.taken or 0 if taking_up else counted)
        return self._restarted if taking_up else None

    def make_iterators(self) -> None:
        """Create the missing iterators, in the order of their loaders."""
        for loader in self._loaders:
            loader.make_iterator()

    def release(self) -> None:
        """Restore the loaders."""
        for loader in self._loaders:
            loader.release()
        self._loaders = []

    # Saving and loading

    def state(
        self,
        *,
        taken: int,
        epoch_over: bool = False,
        within_step: bool = False,
        accumulating: bool = False,
        restarted: Sequence[bool] = (),
    ) -> dict[str, Any]:
        """Return this rank's part of the state.

        Args:
            taken: Batches of this epoch whose step was made.
            epoch_over: Whether the last batch was among them.
            within_step: Whether a step is in progress.
            accumulating: Whether gradients of earlier batches wait for the optimizer step.
            restarted: For each loader, whether it was exhausted in this epoch and started again.

        Raises:
            ValueError: If something cannot be replayed, and that must be refused.
        """
        self.review()
        if within_step:
            reason = "a step that a checkpoint is saved amid, as after an error, is made again"
            self.name(reason, cure="Save when a step is over, as ModelCheckpoint does.")
        if accumulating:
            reason = "gradients of this accumulation so far are not in a checkpoint"
            self.name(
                reason, cure="Save when its optimizer step is made, as ModelCheckpoint(every_n_train_steps=...) does."
            )
        self._is_early = self._saved is not None
        return {
            "run": self._run,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "random": random_state(self._generators) if self._now is None else self._now,
            "taken": taken,
            "restarted": list(restarted),
            "loaders": None if epoch_over else [loader.position(taken) for loader in self._loaders],
            "ends": [loader.end() for loader in self._loaders] if epoch_over else None,
        }

    def is_own(self, states: Sequence[dict[str, Any]], *, process: int) -> bool:
        """Return whether this very run has saved ``states``, as a callback that tries values and undoes it.

        Such a callback restores generators itself, or as Lightning does; and it restarts the epoch.
        """
        own = process < len(states) and states[process].get("run") == self._run
        if own and self._is_early:
            self._saved, self._now, self._at_end = None, None, False
            self.name(
                "what tries values, as LearningRateFinder does, lets the epoch begin anew in which it is resumed",
                cure="Leave it out of the resumed run.",
            )
        return own

    def load(self, states: Sequence[dict[str, Any]], *, process: int) -> None:
        """Load the state; the next call of `follow` uses it.

        With the same number of ranks, each restores its own position. With another number, each skips as many whole
        batches as cover the samples that all ranks had consumed. A new process seeds its generators from those of rank
        0.

        Args:
            states: The states of all processes, in order.
            process: The index of this process.
        """
        own = states[process] if process < len(states) else None
        self._all = [state for _, state in sorted({state["rank"]: state for state in states}.items())]
        if states[0]["num_ranks"] != self._num_ranks:
            self._saved = states[0]
        elif own is not None and own["rank"] == self._rank:
            self._saved = own
        else:
            self._saved = next(state for state in states if state["rank"] == self._rank)
        self._at_end = self._saved["loaders"] is None
        if own is None:
            seed_from(states[0]["random"], rank=process)
        self._now = random_state() if own is None else own["random"]

    @property
    def unused(self) -> bool:
        """Whether a state was loaded that `follow` has not used."""
        return self._saved is not None

    # Random numbers

    @property
    def waiting(self) -> bool:
        """Whether the generators are still to be restored."""
        return self._now is not None

    @property
    def before_epoch(self) -> bool:
        """Whether the generators are restored when the next epoch begins, and not by its first batch."""
        return self._now is not None and self._at_end

    def begin(self) -> bool:
        """Record that training begins; return whether it begins after the end of an epoch."""
        at_end, self._at_end = self._at_end, False
        return at_end

    def begin_epoch(self) -> None:
        """Restore the generators if an epoch begins; within an epoch, its first batch does it."""
        if not any(loader.taking_up for loader in self._loaders):
            self.put_back()

    def put_back(self) -> None:
        """Restore the generators to the time of saving, unless an epoch is about to begin."""
        if self._now is not None and not self._at_end:
            restore_random_state(self._now, self._generators)
            self._now = None

    def lend(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with the generators of the time of saving, and remember their state afterwards."""
        if self._now is None:
            return function()
        restore_random_state(self._now, self._generators)
        result = function()
        self._now = random_state(self._generators)
        return result

    # What cannot be replayed

    def review(self) -> None:
        """Warn or raise about what cannot be replayed and was not reported yet."""
        self.name(*(reason for loader in self._loaders for reason in loader.unreplayable()))

    @property
    def refuses(self) -> bool:
        """Whether it is an error if something cannot be replayed."""
        return self._policy == "refuse"

    def name(self, *reasons: str, cure: str = _CURE) -> None:
        """Warn or raise because of ``reasons`` why a resumed run may differ from an uninterrupted one."""
        new = [reason for reason in dict.fromkeys(reasons) if reason not in self._named]
        if not new:
            return
        self._named.update(new)
        text = (
            f"A resumed run may differ from one that was not interrupted: {'; '.join(new)}."
            " State that is not in the checkpoint cannot be replayed."
        )
        if self.refuses:
            raise ValueError(f"{text} {cure[:-1]}, or set on_unreplayable='warn'.")
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(f"{text} {cure}", UserWarning, stacklevel=2)

    @property
    def _generators(self) -> list[Any]:
        return [generator for loader in self._loaders for generator in loader.generators]


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
        self._undo = follow_loaders(
            trainer, before=self._follow, epoch=self._resumption.epoch, again=lambda: self._resumption.unused
        )
        self._positioned = False  # whether a checkpoint with a position was loaded
        self._silence: Any = None  # the warnings filter that is added here

    def state(self) -> dict[str, Any]:
        """Return the state of all ranks on rank 0, and nothing elsewhere. A collective."""
        if is_before_validation(self._trainer):
            reason = "Lightning leaves out a validation that follows the step after which it was saved"
            self._resumption.name(reason, cure="Save after another step, or when validation is over.")
        self._name_what_lightning_changes()
        own = self._resumption.state(
            taken=batches_taken(self._trainer),
            epoch_over=is_epoch_over(self._trainer),
            within_step=is_within_step(self._trainer),
            accumulating=in_accumulation(self._trainer),
            restarted=restarted_loaders(self._trainer),
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

    def begin(self) -> str:
        """Record that training begins, and return a line about where it resumes, if that is within an epoch.

        Raises:
            ValueError: If a run resumed from any checkpoint of this run could not be exact, and that must be refused.
        """
        if self._resumption.refuses:  # a warning is given when a checkpoint is saved
            self._name_what_lightning_changes()
        if self._resumption.begin():
            begin_epoch_anew(self._trainer)
        if self._positioned:
            keep_resumed_checkpoint(self._trainer)
        trainer, taken = self._trainer, self._resumption.taken
        total = f" of {trainer.num_training_batches}" if isfinite(trainer.num_training_batches) else ""
        return f"ExactResume: continues with batch {taken + 1}{total} of epoch {trainer.current_epoch}" if taken else ""

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
