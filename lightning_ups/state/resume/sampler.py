"""The class and the seed of a loader's sampler, which determine the order of samples besides the generators.

A DistributedSampler seeds its own generator for every epoch. Under distributed strategies Lightning adds a shuffling
one with the global seed of the run, which may differ in each run.
"""

from contextlib import suppress
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

__all__ = ["as_text", "order_of", "put_back_seed"]


def order_of(loader: Any) -> dict[str, Any] | None:
    """Return the properties that determine the order of samples, besides generators; None if no sampler does."""
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


def put_back_seed(loader: Any, order: dict[str, Any]) -> None:
    """Set the seed of the loader's DistributedSampler to that of ``order``, if both are such samplers."""
    sampler, now = _sampler_of(loader), order_of(loader)
    if isinstance(sampler, DistributedSampler) and now != order == {**(now or {}), "seed": order["seed"]}:
        with suppress(AttributeError):  # a property of a subclass
            sampler.seed = order["seed"]


def as_text(order: dict[str, Any]) -> str:
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
