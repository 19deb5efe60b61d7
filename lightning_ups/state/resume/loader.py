"""The position of one loader, and how it is restored.

Note [What is replayed]. A position consists of the state of all generators when the loader's iterator was created,
their state when its sampler began, and the number of batches that the training loop has consumed; workers and
prefetchers have read further. To restore it, the iterator is created from the first state and the sampler begins from
the second. The first batches of indices are drawn and dropped, so that no consumed sample is read, and a checksum over
them shows whether they are those that were trained on. Batches that this process had read ahead are read again from the
state in which they were read. Then the generators get their state at the time of saving. A sampler's own seed is not in
a generator; see `_order_of`.

The iterator is created late, when its first batch is requested, so that the same hooks run before it as in an
uninterrupted run.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_ups._compat.lightning.loaders import Followed, generators_of, keeps_workers, reads_by_index
from lightning_ups.transforms.random_state import host_state, restore_host_state

if TYPE_CHECKING:
    from lightning_ups.state.resume.resumption import Resumption

_REMEMBERED = 64  # batches that may be read ahead
_SAME_SAMPLER = (
    "Under distributed strategies Lightning puts in a sampler of its own, which shuffles: go on with the strategy that"
    " wrote the checkpoint, on one device, too, or give the loader the sampler that it had."
)


@dataclass
class _Position:
    number: int  # of batches in this epoch
    given: int = 0  # of batches by this iterator
    start: dict[str, Any] | None = None  # generators when the iterator was created, and when its sampler began
    digest: int = 0  # of the indices of these batches
    before_next: dict[str, Any] | None = None  # generators when the next batch was read
    state: Any = None  # state at that time, of a loader that has one
    ended: bool = False  # whether this iterator was asked for another batch and had none


class FollowedLoader:
    """Follows ``loader``: counts its batches, and restores a position.

    Args:
        loader: A DataLoader, a wrapper with the attribute ``loader``, or any iterable.
        listener: Holds the generators' state at the time of saving, and reports what cannot be replayed.
    """

    def __init__(self, loader: Any, listener: "Resumption") -> None:
        self._given, self._inner, self._listener = loader, _innermost(loader), listener
        self._stateful = hasattr(self._inner, "state_dict") and hasattr(self._inner, "load_state_dict")
        self._by_index = reads_by_index(self._inner)
        self._followed = Followed(self._inner, self) if isinstance(self._inner, DataLoader) else None
        self.generators = generators_of(self._inner)
        # Weak, since it references this follower: in a cycle its workers would live until garbage is collected, which
        # would then wait for them.
        self._iterator: ref[_Iterator] | None = None
        self._pending: dict[str, Any] | None = None  # a position to restore
        self._ended: dict[str, Any] | None = None  # the state at the end of an epoch
        self._unseed: dict[str, Any] | None = None  # generators before workers were seeded
        self._replay: list[dict[str, Any] | None] = []  # generators for batches that had been read ahead
        self._skip, self._expected = 0, None  # batches of indices to drop, and their checksum
        self._digests: dict[int, int] = {}  # of batches whose indices were drawn, but which were not returned yet
        self._current = _Position(0)
        self._positions: deque[_Position] = deque([self._current], maxlen=_REMEMBERED)

    @property
    def stand_in(self) -> Any:
        """The object that identifies the loader: itself, or the DataLoader that it wraps."""
        return self._given if self._followed is not None else _stand_in(self._given, self)

    @property
    def taking_up(self) -> bool:
        """Whether a position is still to be restored."""
        return self._pending is not None

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch, as far as the loader knows."""
        return getattr(self._inner, "batch_size", None) or 1

    @property
    def order(self) -> dict[str, Any] | None:
        """The properties of the loader's sampler that determine the order of samples, besides generators."""
        return _order_of(self._inner)

    def release(self) -> None:
        """Restore the loader."""
        if self._followed is not None:
            self._followed.release()

    # Positions

    def begin_epoch(self, number: int) -> None:
        """Record that the loop starts a new iteration, and has consumed ``number`` batches of this epoch."""
        self._current = _Position(number)
        self._positions.clear()
        self._positions.append(self._current)

    def position(self, number: int) -> dict[str, Any]:
        """Return the position after batch ``number`` of this epoch."""
        if self._pending is not None:
            return self._pending
        at = next((p for p in reversed(self._positions) if p.number == number), None)
        if at is None and self._current.ended and number > self._current.number:
            at = self._current  # other loaders go on, and this one is exhausted
        if at is None:
            raise RuntimeError(
                f"{self._name()} has given {self._current.number} batches, and the loop has taken {number}."
                f" Positions are kept of the last {_REMEMBERED} batches, since that many may be read ahead."
                " Read fewer batches ahead."
            )
        later = [p for p in self._positions if at.number <= p.number < self._current.number]
        # reaching the end was read ahead, too
        ahead = [*later, self._current] if later and self._current.ended else later
        return {
            "given": at.given,
            "ended": at.ended,
            "start": at.start,
            "digest": at.digest,
            "ahead": [p.before_next for p in ahead],
            "batch_size": self.batch_size,
            "state": at.state if ahead else self.state(),
            "order": self.order,
        }

    def end(self) -> dict[str, Any]:
        """Return the position at the end of an epoch."""
        return {
            "state": self.state(),
            "ended": self._current.ended,
            "workers": keeps_workers(self._inner),
            "order": self.order,
        }

    def state(self) -> Any:
        """Return the state of a loader that has one."""
        if self._ended is not None and self._ended["state"] is not None:
            return self._ended["state"]  # not loaded yet
        return self._inner.state_dict() if self._stateful else None

    def take_up(self, position: dict[str, Any]) -> None:
        """Start the next iterator at ``position``."""
        self._pending = position

    def divide(
        self, positions: Sequence[dict[str, Any]], *, ranks_before: int, ranks_now: int
    ) -> dict[str, Any] | None:
        """Return the position for another number of ranks: after as many whole batches as all ranks have consumed.

        Args:
            positions: Those of the ranks that saved the checkpoint.
            ranks_before: The number of those ranks.
            ranks_now: The number of ranks now.
        """
        position = positions[0]
        if self._stateful:
            state = self.divide_states(positions)
            if state is None:
                reason = f"the position of {self._name()}, whose state is that of one rank of {ranks_before}"
                self._listener.name(reason)
                return None
            return {**position, "state": state, "ahead": []}
        samples = position["given"] * position["batch_size"] * ranks_before
        given = getattr(_sampler_of(self._inner), "batches_done", None)  # a sampler that has divided the rest itself
        if given is None:
            given = samples // (self.batch_size * ranks_now)
        return {**position, "given": given, "digest": None, "ahead": []}

    def divide_states(self, positions: Sequence[dict[str, Any]]) -> Any:
        """Return the state for this rank, of a loader that divides those of another number of ranks; else None."""
        divide = getattr(self._inner, "divide", None)
        return divide([position["state"] for position in positions]) if self._stateful and divide else None

    def take_up_end(self, end: dict[str, Any]) -> None:
        """Start the next epoch after ``end``."""
        self._ended = end

    def take_up_order(self, order: dict[str, Any]) -> None:
        """Restore the seed of the sampler, and report if its order still differs."""
        _restore_seed(self._inner, order)
        now = self.order
        if now is None or now == order or self._stateful:
            return
        if self._pending is not None:
            self._pending = {**self._pending, "digest": None}  # it would report the same without the reason
        reason = f"in another order than before the checkpoint, by {_as_text(now)} and not by {_as_text(order)}"
        self._listener.name(f"{self._name()} gives its samples {reason}", cure=_SAME_SAMPLER)

    # Iteration

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator that replaces the one of ``make``."""
        late = self._pending is not None or self._ended is not None or self._listener.waiting
        iterator = _Iterator(self, (lambda: self._late(make)) if late else self._begun(make))
        self._iterator = ref(iterator)
        return iterator

    def make_iterator(self) -> None:
        """Create the iterator, if it is still missing."""
        if self._iterator is not None and (iterator := self._iterator()) is not None:
            iterator.make()

    def _late(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._pending is not None:
            return self._taken_up(make)
        return self._listener.lend(lambda: self._after_end(make))

    def _begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._current.start = {"iterator": host_state(self.generators), "sampler": None}
        self._current.given = self._current.digest = self._skip = 0
        self._current.ended = False
        self._digests.clear()
        return make()

    def _after_end(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        ended, self._ended = self._ended, None
        if ended is not None and ended["state"] is not None:
            self._inner.load_state_dict(ended["state"])
            if ended.get("ended"):  # nothing is read early: other loaders draw random numbers first
                return _again_if_empty(self._begun(make), make)
            found, iterator = host_state(self.generators), make()
            try:
                first = next(iterator)
            except StopIteration:  # the epoch had ended, which the loop knew by its length only
                restore_host_state(found, self.generators)
            else:
                return chain([first], iterator)
        if ended is not None and ended["workers"]:
            self._unseed = host_state(self.generators)  # persistent workers are not seeded again
        return self._begun(make)

    def _taken_up(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        assert self._pending is not None
        position, self._pending = self._pending, None
        self._replay = list(position["ahead"])
        self._current.ended = position.get("ended", False)  # older checkpoints do not have it
        if self._current.ended and self._stateful:
            self._current.given = position["given"]
            self._ended = {"state": position["state"], "ended": True, "workers": False}
            return iter(())
        if self._stateful:
            self._inner.load_state_dict(position["state"])
        if self._stateful or position["start"] is None:
            iterator = self._listener.lend(lambda: self._begun(make))
            self._current.given = position["given"]
            return iterator
        self._current.start, self._current.given = position["start"], position["given"]
        self._current.digest = position["digest"] or 0
        self._skip, self._expected = position["given"], position["digest"]
        self._digests.clear()
        found = host_state(self.generators)
        restore_host_state(position["start"]["iterator"], self.generators)
        iterator = make()
        if not self._by_index:
            for _ in range(self._skip):
                next(iterator)
        if self._current.ended:  # created anyway, for persistent workers, and its sampler is exhausted
            if next(iterator, None) is not None:
                self._check(None)
            iterator = iter(())
        restore_host_state(found, self.generators)  # another loader's first batch may have restored them
        return iterator

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Iterate over ``sampler`` in place of the loader, and drop what was already trained on."""
        start, skip, self._skip = self._current.start, self._skip, 0
        assert start is not None
        if self._unseed is not None:
            restore_host_state(self._unseed, self.generators)
            self._unseed = None
        found = host_state(self.generators)
        if skip and start["sampler"] is not None:
            restore_host_state(start["sampler"], self.generators)
        else:
            start["sampler"] = found
        digest = 0
        for number, indices in enumerate(sampler, start=1):
            digest = zlib.crc32(repr(indices).encode(), digest)
            if number == skip:
                self._check(digest)
                if self._reads_here:
                    restore_host_state(found, self.generators)  # the time of saving, restored before this batch
            if number > skip:
                self._digests[number] = digest
                yield indices

    def _check(self, digest: int | None) -> None:
        if self._expected is not None and digest != self._expected:
            self._listener.name(f"{self._name()} does not give the samples that it gave before the checkpoint")

    @property
    def is_early(self) -> bool:
        """Whether a batch is read before the epoch begins, which is when generators are restored."""
        return self._listener.before_epoch

    def lend(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with the generators of the time of saving, and remember their state afterwards."""
        return self._listener.lend(function)

    def make_iterators(self) -> None:
        """Create the iterators of all loaders in order: each draws random numbers when it is created."""
        self._listener.make_iterators()

    @property
    def ended(self) -> bool:
        """Whether this iterator is exhausted, and was asked for more."""
        return self._current.ended

    def before_fetch(self) -> None:
        """Prepare for reading a batch."""
        if not self._replay:
            self._listener.put_back()
        elif (state := self._replay.pop(0)) is not None:
            restore_host_state(state, self.generators)
        if self._reads_here:
            self._current.before_next = host_state(self.generators)
        if self._stateful:
            self._current.state = self._inner.state_dict()

    def end_iterator(self) -> None:
        """Record that there was no further batch."""
        self._current.ended = True

    def fetched(self) -> None:
        """Record that a batch was read."""
        last, given = self._current, self._current.given + 1
        self._current = _Position(last.number + 1, given, last.start, self._digests.pop(given, last.digest))
        self._positions.append(self._current)
        if given == 2:  # by now the workers have shown whether they draw
            self._listener.review()

    @property
    def _reads_here(self) -> bool:
        return getattr(self._inner, "num_workers", 0) == 0

    # What cannot be replayed

    def unreplayable(self) -> Iterator[str]:
        """Yield reasons why a run that restores a position of this loader may differ."""
        if self._followed is not None and self._followed.workers_draw:
            yield f"the workers of {self._name()} draw random numbers"
        if not self._by_index and not self._stateful:
            yield f"{self._name()} cannot skip samples and has no state, so it will be read again from its beginning"

    def _name(self) -> str:
        dataset = getattr(self._inner, "dataset", None)
        return type(self._inner).__name__ + (f" of {type(dataset).__name__}" if dataset is not None else "")


class _Iterator:
    def __init__(self, follower: FollowedLoader, inner: Iterator[Any] | Callable[[], Iterator[Any]]) -> None:
        self._follower, self._inner = follower, inner

    @property
    def inner(self) -> Any:
        """The wrapped iterator, or None before it exists."""
        return None if callable(self._inner) else self._inner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._follower.is_early:
            return self._follower.lend(self._next)
        return self._next()

    def _next(self) -> Any:
        if callable(self._inner):
            self._follower.make_iterators()
        assert not callable(self._inner)
        if self._follower.ended:
            raise StopIteration  # generators are restored by a loader that goes on
        self._follower.before_fetch()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._follower.end_iterator()
            raise
        self._follower.fetched()
        return batch

    def make(self) -> None:
        if callable(self._inner):
            self._inner = self._inner()


def _again_if_empty(iterator: Iterator[Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    empty = True
    for batch in iterator:
        empty = False
        yield batch
    if empty:
        yield from make()


class _StandIn:
    def __init__(self, loader: Any, follower: FollowedLoader) -> None:
        self._loader, self._follower = loader, follower

    def __iter__(self) -> Iterator[Any]:
        return self._follower.iterate(lambda: iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _SizedStandIn(_StandIn):
    def __len__(self) -> int:
        return len(self._loader)


def _stand_in(loader: Any, follower: FollowedLoader) -> _StandIn:
    return (_SizedStandIn if hasattr(loader, "__len__") else _StandIn)(loader, follower)


def _innermost(loader: Any) -> Any:
    # A prefetcher has the loader that it reads as an attribute.
    inner = getattr(loader, "loader", None)
    return loader if isinstance(loader, DataLoader) or not isinstance(inner, DataLoader) else inner


def _order_of(loader: Any) -> dict[str, Any] | None:
    """Return the properties that determine the order of samples, besides generators; None if no sampler does.

    A DistributedSampler seeds its own generator for every epoch. Under distributed strategies Lightning adds one with
    the global seed of the run, which may differ in each run.
    """
    sampler = _sampler_of(loader)
    if sampler is None:
        return None
    shuffle, seed = getattr(sampler, "shuffle", None), getattr(sampler, "seed", None)
    if type(sampler) is DistributedSampler and not shuffle:  # all ranks together read in order
        return {"sampler": SequentialSampler.__name__, "shuffle": None, "seed": None}
    return {
        "sampler": type(sampler).__name__,
        "shuffle": shuffle if isinstance(shuffle, bool) else None,
        "seed": int(seed) if isinstance(seed, Integral) else None,
    }


def _restore_seed(loader: Any, order: dict[str, Any]) -> None:
    """Set the seed of the loader's DistributedSampler to that of ``order``, if both are such samplers."""
    sampler, now = _sampler_of(loader), _order_of(loader)
    if isinstance(sampler, DistributedSampler) and now != order == {**(now or {}), "seed": order["seed"]}:
        with suppress(AttributeError):  # a property of a subclass
            sampler.seed = order["seed"]


def _as_text(order: dict[str, Any]) -> str:
    """Return ``order`` as text for a message."""
    options = [f"{name}={order[name]}" for name in ("shuffle", "seed") if order[name] is not None]
    return order["sampler"] + (f"({', '.join(options)})" if options else "")


def _sampler_of(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return loader.sampler
    # A loader with a batch sampler has a default sampler that nobody reads.
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
