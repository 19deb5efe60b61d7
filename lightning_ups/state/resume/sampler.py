"""What a loader's sampler has to itself: its kind and its seed decide the order of samples, and no generator has them.

A DistributedSampler seeds a generator of its own for every epoch. Lightning puts one in under distributed strategies,
shuffling, with the global seed of the run, which may be drawn anew for each.
"""

from contextlib import suppress
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

__all__ = ["as_text", "order_of", "put_back_seed"]


def order_of(loader: Any) -> dict[str, Any] | None:
    """Return, as plain values, what decides the order of samples beside generators; None if no sampler does."""
    sampler = _sampler_of(loader)
    if sampler is None:
        return None
    shuffle, seed = getattr(sampler, "shuffle", None), getattr(sampler, "seed", None)
    if type(sampler) is DistributedSampler and not shuffle:  # all ranks together go in order
        return {"sampler": SequentialSampler.__name__, "shuffle": None, "seed": None}
    return {
        "sampler": type(sampler).__name__,
        "shuffle": shuffle if isinstance(shuffle, bool) else None,
        "seed": int(seed) if isinstance(seed, Integral) else None,
    }


def put_back_seed(loader: Any, order: dict[str, Any]) -> None:
    """Give the loader's DistributedSampler the seed of ``order``, if that is of such a sampler."""
    sampler, now = _sampler_of(loader), order_of(loader)
    if isinstance(sampler, DistributedSampler) and now != order == {**(now or {}), "seed": order["seed"]}:
        with suppress(AttributeError):  # a property of a subclass
            sampler.seed = order["seed"]


def as_text(order: dict[str, Any]) -> str:
    """Return how to name ``order`` in a message."""
    options = [f"{name}={order[name]}" for name in ("shuffle", "seed") if order[name] is not None]
    return order["sampler"] + (f"({', '.join(options)})" if options else "")


def _sampler_of(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return loader.sampler
    # One that was given leaves the loader a sampler that nobody reads.
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
