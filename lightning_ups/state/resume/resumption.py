"""A run's position in its data and its random numbers, on every rank."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import torch.distributed as dist

from lightning_ups.state.resume.loader import FollowedLoader
from lightning_ups.transforms.random_state import random_state, restore_random_state, seed_from

__all__ = ["RESUME_KEY", "OnUnreplayable", "Progress", "Resumption"]

RESUME_KEY = "lightning_ups.resume"  # in a checkpoint
OnUnreplayable = Literal["warn", "refuse"]
_CURE = "Let the loader have a state_dict, or draw random numbers from the sample's index."


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training loop is.

    Args:
        taken: Batches of this epoch of which it made the step.
        epoch_over: Whether it made that of the last one.
        within_step: Whether it is amid a step.
        accumulating: Whether gradients of earlier batches wait for the optimizer step.
        restarted: For each loader, whether it was read to its end in this epoch, and begun again.
    """

    taken: int
    epoch_over: bool = False
    within_step: bool = False
    accumulating: bool = False
    restarted: Sequence[bool] = ()


class Resumption:
    """Knows where this rank stands in its training data, and takes the position up again.

    Args:
        on_unreplayable: ``"warn"`` of what cannot be replayed, once, or ``"refuse"`` it.
        rank: Of this process among those that read different data.
        num_ranks: How many read different data.
    """

    def __init__(self, *, on_unreplayable: OnUnreplayable, rank: int = 0, num_ranks: int = 1) -> None:
        self._policy, self._rank, self._num_ranks = on_unreplayable, rank, num_ranks
        self._loaders: list[FollowedLoader] = []
        self._saved: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None  # generators at the moment of saving, until they are put back
        self._at_end = False
        self._counted = 0  # batches of this epoch before the first one that is known of
        self._named: set[str] = set()
        self._restarted: list[bool] = []
        self._orders: list[tuple[Any, Any]] = []  # of each loader's samples: as this run has it, and as the saved one
        self.taken: int | None = None
        self._run, self._is_early = uuid4().hex, False  # whether the last state is from before a loaded one was used

    # Following

    def follow(self, loaders: Sequence[Any], *, counted: int = 0, at_end: bool = False) -> list[Any]:
        """Follow ``loaders``, and let them begin where the loaded state says.

        Sets ``taken`` to the batches of this epoch that the loop should have taken, or None if that is unknown.

        Args:
            loaders: All for training.
            counted: Batches from which the loop goes on to count, if it was loaded without a state of this kind.
            at_end: Whether it was loaded without such a state at the end of an epoch.

        Returns:
            The objects that identify them: themselves, if they are DataLoaders.

        Raises:
            ValueError: If they are fewer or more than those of the loaded state, or if one cannot be replayed and that
                is to be refused.
        """
        self.release()
        self._loaders = [FollowedLoader(loader, self) for loader in loaders]
        saved, self._saved, self.taken = self._saved, None, None
        self._counted = counted if saved is None else 0
        if saved is None and (counted or at_end):
            self._at_end = at_end
            self.name(
                "the checkpoint holds no position of the data, which is read from its beginning: it was saved without"
                " exact resuming, or by Trainer.save_checkpoint after fit and not during it, as ModelCheckpoint saves",
                cure="Let ModelCheckpoint save in a run that has this.",
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
            return  # saved before there was a loader, as another run's trial of learning rates: from the beginning
        if len(positions) != len(self._loaders):
            raise ValueError(
                f"The checkpoint holds the positions of {len(positions)} training loaders, and there are"
                f" {len(self._loaders)}."
                " A position belongs to one loader, in the order in which they are given."
                " Give the loaders of the run that was saved, or start from its weights alone."
            )
        self._orders = [(loader.order, p.get("order")) for loader, p in zip(self._loaders, positions, strict=True)]
        alike = saved["num_ranks"] == self._num_ranks
        if over:
            for loader, end in zip(self._loaders, positions, strict=True):
                loader.take_up_end(end if alike else {**end, "state": None})
            return
        if not alike:
            ranks = {"ranks_before": saved["num_ranks"], "ranks_now": self._num_ranks}
            positions = [loader.divide(p, **ranks) for loader, p in zip(self._loaders, positions, strict=True)]
        for loader, position in zip(self._loaders, positions, strict=True):
            if position is not None:
                loader.take_up(position)
        self.taken = saved["taken"] if alike else max((p["given"] for p in positions if p is not None), default=0)
        self._restarted = list(saved["restarted"])

    def _take_up_orders(self) -> None:
        for loader, (found, saved) in zip(self._loaders, self._orders, strict=False):
            if saved is not None and loader.order == found:  # else its maker gives it another seed each time
                loader.take_up_order(saved)

    def epoch(self) -> list[bool] | None:
        """Note that the loaders are about to be iterated anew; return which were read to their end before, if known."""
        taking_up = any(loader.taking_up for loader in self._loaders)
        counted, self._counted = self._counted, 0
        for loader in self._loaders:
            loader.begin_epoch(self.taken or 0 if taking_up else counted)
        return self._restarted if taking_up else None

    def make_iterators(self) -> None:
        """Make the iterators that are still to be made, in the order of their loaders."""
        for loader in self._loaders:
            loader.make_iterator()

    def release(self) -> None:
        """Give the loaders back as they were."""
        for loader in self._loaders:
            loader.release()
        self._loaders = []

    # Saving and loading

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return this rank's part of the state.

        Raises:
            ValueError: If something cannot be replayed, and that is to be refused.
        """
        self.review()
        if progress.within_step:
            reason = "a step that a checkpoint is saved amid, as after an error, is made again"
            self.name(reason, cure="Save when a step is over, as ModelCheckpoint does.")
        if progress.accumulating:
            reason = "gradients of this accumulation so far are not in a checkpoint"
            self.name(
                reason, cure="Save when its optimizer step is made, as ModelCheckpoint(every_n_train_steps=...) does."
            )
        over = progress.epoch_over
        self._is_early = self._saved is not None
        return {
            "run": self._run,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "random": random_state(self._generators) if self._now is None else self._now,
            "taken": progress.taken,
            "restarted": list(progress.restarted),
            "loaders": None if over else [loader.position(progress.taken) for loader in self._loaders],
            "ends": [loader.end() for loader in self._loaders] if over else None,
        }

    def is_own(self, states: Sequence[dict[str, Any]], *, process: int) -> bool:
        """Return whether this very run has saved ``states``, as a callback does that tries values and undoes it.

        Such a one leaves generators as it found them, or as Lightning alone would; and it lets an epoch begin anew.
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
        """Take the state up; the next call of `follow` uses it.

        On as many ranks as before, each takes up its own position. On another number, each takes as many whole batches
        as taken as make up the samples that all ranks took together. A process that is new seeds its generators from
        those of the first.

        Args:
            states: Of all processes, in order.
            process: The number of this one among all.
        """
        own = states[process] if process < len(states) else None
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

    # Random numbers

    @property
    def waiting(self) -> bool:
        """Whether the generators are still to be put back."""
        return self._now is not None

    @property
    def before_epoch(self) -> bool:
        """Whether the generators are put back when the next epoch begins, and not by its first batch."""
        return self._now is not None and self._at_end

    def begin(self) -> bool:
        """Note that training begins; return whether it begins after the end of an epoch."""
        at_end, self._at_end = self._at_end, False
        return at_end

    def begin_epoch(self) -> None:
        """Put the generators back where an epoch begins; within one, its first batch does it."""
        if not any(loader.taking_up for loader in self._loaders):
            self.put_back()

    def put_back(self) -> None:
        """Put the generators back as they were at the moment of saving, unless an epoch is to begin first."""
        if self._now is not None and not self._at_end:
            restore_random_state(self._now, self._generators)
            self._now = None

    def lend(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with the generators as at the moment of saving, and remember how it left them."""
        if self._now is None:
            return function()
        restore_random_state(self._now, self._generators)
        result = function()
        self._now = random_state(self._generators)
        return result

    # What cannot be replayed

    def review(self) -> None:
        """Warn of, or refuse, what cannot be replayed and was not named yet."""
        self.name(*(reason for loader in self._loaders for reason in loader.unreplayable()))

    @property
    def refuses(self) -> bool:
        """Whether what cannot be replayed is an error."""
        return self._policy == "refuse"

    def name(self, *reasons: str, cure: str = _CURE) -> None:
        """Warn of, or refuse, ``reasons`` why a resumed run may differ from one that was not interrupted."""
        new = [reason for reason in dict.fromkeys(reasons) if reason not in self._named]
        if not new:
            return
        self._named.update(new)
        text = (
            f"A resumed run may differ from one that was not interrupted: {'; '.join(new)}."
            " What is not in a checkpoint, and cannot be drawn again, cannot be replayed."
        )
        if self.refuses:
            raise ValueError(f"{text} {cure[:-1]}, or set on_unreplayable='warn'.")
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(f"{text} {cure}", UserWarning, stacklevel=2)

    @property
    def _generators(self) -> list[Any]:
        return [generator for loader in self._loaders for generator in loader.generators]
