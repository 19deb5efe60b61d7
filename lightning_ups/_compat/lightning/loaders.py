"""Internals of DataLoaders: follows what a loader reads, and reads a batch ahead.

This is not public in torch. To follow a loader, its object gets a subclass of its class, so that references to it and
type checks see no difference; `Followed.release` restores the class.

A batch that is read ahead is held below the iterator that Lightning reads: positions, counts, ends and errors take
effect when the batch is requested, not before.
"""

import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ref

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _MultiProcessingDataLoaderIter

from lightning_ups._compat import patches


class Follower(Protocol):
    """Observes a loader, and may replace its batches."""

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator that replaces the loader's, which ``make`` creates."""
        ...

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Iterate over ``sampler`` in place of the loader."""
        ...


class Followed:
    """A loader that reports every iterator to ``follower``, and detects whether its workers draw random numbers.

    It holds no reference to the follower.
    """

    def __init__(self, loader: DataLoader[Any], follower: Follower) -> None:
        self.loader, self._kind = loader, type(loader)
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._drawn = None
        loader.__class__ = _followed_class(self._kind, ref(follower))
        # from an earlier epoch: their iterator has kept the sampler, which reports to another follower or to none
        if keeps_workers(loader):
            loader._iterator._index_sampler = loader._index_sampler  # type: ignore[union-attr]
        if loader.num_workers > 0:
            self._drawn = torch.multiprocessing.get_context().RawValue("b", 0)
            loader.collate_fn = collate = _WatchedCollate(self._collate, self._drawn)
            loader.worker_init_fn = _MarkAtStart(self._init, collate)

    @property
    def workers_draw(self) -> bool:
        """Whether a worker has drawn a random number for a batch."""
        return self._drawn is not None and bool(self._drawn.value)

    def release(self) -> None:
        """Restore the class of the loader."""
        self.loader.__class__ = self._kind
        self.loader.collate_fn, self.loader.worker_init_fn = self._collate, self._init


def _followed_class(kind: type[DataLoader[Any]], follower: ref[Follower]) -> type[DataLoader[Any]]:
    # Weak: a class is always in a cycle, which would also keep the follower, the loader and its dataset alive.
    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        told = follower()
        return kind.__iter__(self) if told is None else told.iterate(lambda: kind.__iter__(self))

    def index_sampler(self: DataLoader[Any]) -> Any:
        sampler = kind._index_sampler.fget(self)  # type: ignore[attr-defined]
        return _FollowedSampler(sampler, follower) if reads_by_index(self) else sampler

    members = {"__iter__": iterate, "_index_sampler": property(index_sampler), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


class _FollowedSampler:
    def __init__(self, sampler: Any, follower: ref[Follower]) -> None:
        self._sampler, self._follower = sampler, follower

    def __iter__(self) -> Iterator[Any]:
        told = self._follower()
        return iter(self._sampler) if told is None else told.indices(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def reads_by_index(loader: Any) -> bool:
    """Return whether ``loader`` is a DataLoader that can skip samples without reading them."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return not hasattr(loader, "load_state_dict")


def keeps_workers(loader: Any) -> bool:
    """Return whether ``loader`` has persistent workers."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the distinct generators of ``loader`` and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


class _WatchedCollate:
    def __init__(self, collate: Callable[[Any], Any], drawn: Any) -> None:
        self._collate, self._drawn = collate, drawn
        self.mark = 0  # of the random state of this worker, after its last batch

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if get_worker_info() is not None:
            now = _fingerprint()
            if now != self.mark:
                self._drawn.value, self.mark = 1, now
        return batch


class _MarkAtStart:
    def __init__(self, init: Callable[[int], None] | None, collate: _WatchedCollate) -> None:
        self._init, self._collate = init, collate  # both in one worker: they are passed to it together

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._collate.mark = _fingerprint()


def _fingerprint() -> int:
    states: list[Any] = [zlib.crc32(torch.get_rng_state().numpy().tobytes()), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(zlib.crc32(numpy.random.get_state()[1].tobytes()))
        states.append(numpy.random.get_state()[2])
    return hash(tuple(states))


_NEXT = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._next_data"
_RESET = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._reset"
_LIBRARIES = ("torch.utils.data.", "lightning.", "lightning_ups.data.")


def why_not(loader: Any, iterator: Any) -> str | None:
    """Return why a batch of ``loader`` cannot be read ahead, or None.

    Reading ahead gives the same results only if it draws no random number of this process and has no effect that
    training could see: if workers read, which are ahead anyway, and the order of samples is fixed when an epoch begins.
    """
    name, iterator = type(loader).__name__, _innermost(iterator)
    if not isinstance(iterator, _BaseDataLoaderIter):
        return f"{name} reads in a way of its own"
    if loader.num_workers == 0:
        return f"{name} reads in this process (num_workers=0)"
    if type(iterator) is not _MultiProcessingDataLoaderIter:
        return f"{name} reads in a way of its own"
    if (missing := patches.why_not(_NEXT) or patches.why_not(_RESET)) is not None:
        return missing
    if iterator._dataset_kind != _DatasetKind.Iterable and not _is_settled(loader):
        return f"the sampler of {name} may draw random numbers as it goes"
    return None


def read_ahead(iterator: Any) -> Any:
    """Return the next batch of ``iterator``, or None if the next is its end or an error.

    Args:
        iterator: An iterator for which `why_not` returns None.
    """
    iterator = _innermost(iterator)
    ahead = vars(iterator).get("_next_data")
    if ahead is None:
        ahead = _Ahead(iterator)
        patches.installed(_NEXT, iterator, lambda _: ahead)
        patches.installed(_RESET, iterator, lambda _: ahead.reset)  # called when persistent workers begin another epoch
    return ahead.read()


class _Ahead:
    """Replaces the method that waits for a worker's batch."""

    def __init__(self, iterator: Any) -> None:
        # Weak: an iterator stops its workers when its last reference is dropped, not at garbage collection.
        self._iterator = weakref.ref(iterator)
        self._waits, self._batch = False, None
        self._error: Exception | None = None

    def read(self) -> Any:
        if not self._waits:
            try:
                self._batch = self._stock()
            except Exception as error:  # noqa: BLE001  (raised where the batch is asked for)
                # Its frames reference the iterator, which would then live until garbage collection.
                self._error = error.with_traceback(None)
            self._waits = True
        return self._batch

    def __call__(self) -> Any:
        if not self._waits:
            return self._stock()
        batch, error = self._batch, self._error
        self._forget()
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would reference this frame, and this frame it
        return batch

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        iterator = self._iterator()
        return type(iterator)._reset(iterator, *args, **kwargs)  # type: ignore[union-attr]

    def _stock(self) -> Any:
        iterator = self._iterator()
        return type(iterator)._next_data(iterator)  # type: ignore[union-attr]

    def _forget(self) -> None:
        self._waits, self._batch, self._error = False, None, None


def _innermost(iterator: Any) -> Any:
    # For exact resuming, the followed iterator has the wrapped one as an attribute.
    while not isinstance(iterator, _BaseDataLoaderIter) and (inner := getattr(iterator, "inner", None)) is not None:
        iterator = inner
    return iterator


def _is_settled(loader: DataLoader[Any]) -> bool:
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    if not type(sampler).__module__.startswith(_LIBRARIES):
        return False
    # It keeps drawing from a generator given by the user; a generator that it creates itself is not visible elsewhere.
    own = isinstance(sampler, RandomSampler) and sampler.generator is not None
    return not own or not (sampler.replacement or sampler.num_samples > len(sampler.data_source))
