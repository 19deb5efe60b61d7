"""Following a DataLoader from the inside: its iterators, its index sampler and the random numbers of its workers.

Nothing of it is public in torch. A loader is followed by giving the object a subclass of its class, so that whoever
holds the loader, and whatever asks for its type, sees no difference; `Followed.release` gives its class back.
"""

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

__all__ = ["Followed", "Follower", "generators_of", "keeps_workers", "reads_by_index"]


class Follower(Protocol):
    """What is told about a loader, and may replace what it gives."""

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator in the place of the loader's, which ``make`` makes."""
        ...

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Iterate over ``sampler`` in the place of the loader."""
        ...


class Followed:
    """A loader that tells ``follower`` of every iterator, and watches whether its workers draw random numbers.

    It does not hold the follower.
    """

    def __init__(self, loader: DataLoader[Any], follower: Follower) -> None:
        self.loader, self._kind = loader, type(loader)
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._drawn = None
        loader.__class__ = _followed_class(self._kind, ref(follower))
        if keeps_workers(loader):  # from before: their iterator has kept the sampler, which tells another, or nobody
            loader._iterator._index_sampler = loader._index_sampler  # type: ignore[union-attr]
        if loader.num_workers > 0:
            self._drawn = torch.multiprocessing.get_context().RawValue("b", 0)
            loader.worker_init_fn = _MarkAtStart(self._init)
            loader.collate_fn = _WatchedCollate(self._collate, self._drawn)

    @property
    def workers_draw(self) -> bool:
        """Whether a worker has drawn a random number for a batch."""
        return self._drawn is not None and bool(self._drawn.value)

    def release(self) -> None:
        """Give the loader back as it was."""
        self.loader.__class__ = self._kind
        self.loader.collate_fn, self.loader.worker_init_fn = self._collate, self._init


def _followed_class(kind: type[DataLoader[Any]], follower: ref[Follower]) -> type[DataLoader[Any]]:
    # Weak: a class is always in a cycle, and with the follower the loader and its dataset would live as long.
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
    """Return whether ``loader`` has workers that live on into the next epoch."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the distinct generators that ``loader`` and its samplers were given."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


_mark = 0  # of the random state of this worker, after its last batch


class _MarkAtStart:
    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        global _mark
        if self._init is not None:
            self._init(worker)
        _mark = _fingerprint()


class _WatchedCollate:
    def __init__(self, collate: Callable[[Any], Any], drawn: Any) -> None:
        self._collate, self._drawn = collate, drawn

    def __call__(self, samples: Any) -> Any:
        global _mark
        batch = self._collate(samples)
        if get_worker_info() is not None:
            now = _fingerprint()
            if now != _mark:
                self._drawn.value, _mark = 1, now
        return batch


def _fingerprint() -> int:
    states: list[Any] = [zlib.crc32(torch.get_rng_state().numpy().tobytes()), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(zlib.crc32(numpy.random.get_state()[1].tobytes()))
        states.append(numpy.random.get_state()[2])
    return hash(tuple(states))
