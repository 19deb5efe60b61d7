"""Choose the worker processes of a DataLoader by a short measurement, and leave its batches as they are."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lightning_ups._compat.environment import usable_cores

Workers = int | Literal["auto"]
_Loader = TypeVar("_Loader", bound=DataLoader[Any])
_GAIN = 1.1  # more workers must give so many times the batches
_PREFETCH = (2, 8)  # the least, which is torch's default, and the most


def tune_workers(make: Callable[..., _Loader], *, max_workers: int | None = None, seconds: float = 1.0) -> _Loader:
    """Return ``make(num_workers=..., prefetch_factor=...)`` with the best of these options, and log them in one line.

    Batches of loaders with 1, 2, 4, ... workers are read for some time each, until more workers no longer give more.
    The random numbers of this process are as before.

    Args:
        make: Creates the loader. It passes the options to DataLoader.
        max_workers: The largest number. None: the cores of this process. Divide them yourself if several ranks share
            them.
        seconds: For each number of workers, besides the time until the first batch.

    Example::

        loader = tune_workers(lambda **options: DataLoader(dataset, batch_size=32, shuffle=True, **options))
    """
    return make(**measured_options(make, max_workers=max_workers, seconds=seconds))


def worker_options(workers: Workers, make: Callable[..., DataLoader[Any]], trainer: Any) -> dict[str, Any]:
    """Return the options of a DataLoader for ``num_workers`` of a datamodule; all ranks choose the same.

    Args:
        workers: A number, or ``"auto"``.
        make: Creates the loader with such options.
        trainer: The datamodule's, if it has one.
    """
    if workers != "auto":
        return {"num_workers": workers}
    if trainer is None:
        return measured_options(make)
    options = measured_options(make, max_workers=max(usable_cores() // trainer.num_devices, 1))
    return trainer.strategy.broadcast(options)


def measured_options(
    make: Callable[..., DataLoader[Any]], *, max_workers: int | None = None, seconds: float = 1.0
) -> dict[str, int]:
    """Return the best options; see `tune_workers`."""
    start, rates = time.monotonic(), dict[int, float]()
    intervals: dict[int, list[float]] = {}
    workers, most = 1, max_workers or usable_cores()
    while workers <= most:
        intervals[workers] = _intervals(make(num_workers=workers, prefetch_factor=_PREFETCH[0]), seconds)
        rates[workers] = len(intervals[workers]) / (sum(intervals[workers]) or 1e-9)
        if rates[workers] < rates.get(workers // 2, 0) * _GAIN:
            break
        workers *= 2
    best = fewest_workers(rates)
    prefetch = prefetch_factor(intervals[best], workers=best)
    others = ", ".join(f"{number}: {rate:.3g}" for number, rate in rates.items() if number != best)
    rank_zero_info(
        f"DataLoader: num_workers={best}, prefetch_factor={prefetch} gives {rates[best]:.3g} batches/s"
        f"{f' ({others})' if others else ''}, measured in {time.monotonic() - start:.1f} s."
    )
    return {"num_workers": best, "prefetch_factor": prefetch}


def fewest_workers(rates: Mapping[int, float]) -> int:
    """Return the fewest workers that give about as many batches in a second as any number."""
    return min(workers for workers, rate in rates.items() if rate * _GAIN >= max(rates.values()))


def prefetch_factor(intervals: Sequence[float], *, workers: int) -> int:
    """Return how many batches each worker must be ahead, so that training does not wait for the slowest one."""
    usual = sum(intervals) / max(len(intervals), 1) or 1.0
    least, most = _PREFETCH
    return min(max(ceil(max(intervals, default=0) / usual / workers), least), most)


def as_it_is(batch: Any) -> Any:
    """Return ``batch``, which has been collated."""
    return batch


def _intervals(loader: DataLoader[Any], seconds: float) -> list[float]:
    """Return the times between batches, after those that workers read while the first one was awaited."""
    found: list[float] = []
    with torch.random.fork_rng(devices=[]):  # an iterator draws the seed of its workers
        batches = iter(loader)
        for _ in range(loader.num_workers * _PREFETCH[0] + 1):
            if next(batches, None) is None:
                break
        last = end = time.monotonic()
        end += seconds
        while last < end and next(batches, None) is not None:
            now = time.monotonic()
            found.append(now - last)
            last = now
    return found
