"""The size of DDP's gradient buckets, from the measured time of reductions."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

_MIB = 2**20
_CANDIDATES = (1.0, 4.0, 10.0, 25.0, 50.0, 100.0)  # MiB
_SMALL, _MANY, _FEW = 10.0, 9, 3  # up to so many MiB, a reduction is timed more often


@dataclass(frozen=True)
class BucketSize:
    """A size in MiB, and the milliseconds that a reduction of each measured size took, on the slowest rank."""

    mb: float
    milliseconds: Mapping[float, float]

    def __str__(self) -> str:
        if not self.milliseconds:
            return f"buckets of {self.mb:g} MiB: all gradients fit into one"
        times = ", ".join(f"{size:g} MiB {ms:.2f} ms" for size, ms in self.milliseconds.items())
        return f"buckets of {self.mb:g} MiB; a reduction of {times}"


def measure_bucket_size(nbytes: int, device: torch.device) -> BucketSize:
    """Time reductions on all ranks, and return the size of buckets for gradients of ``nbytes``.

    Small buckets leave little to wait for after the backward, and make more reductions, each with a latency. The choice
    minimizes the time of all reductions and the time of the last one together. All ranks call this, and get the same.
    """
    total = math.ceil(nbytes / _MIB)
    if total <= _CANDIDATES[0]:
        return BucketSize(max(float(total), 1.0), {})
    sizes = [size for size in _CANDIDATES if size < total]
    if total <= _CANDIDATES[-1]:
        sizes.append(float(total))
    times = torch.tensor([_seconds(size, device) for size in sizes], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    measured = dict(zip(sizes, times.tolist(), strict=True))
    return BucketSize(best_size(measured, total), {size: found * 1e3 for size, found in measured.items()})


def best_size(seconds: Mapping[float, float], total: float) -> float:
    """Return the size for which all reductions of ``total`` and the last one again take the least time."""
    return min(seconds, key=lambda size: seconds[size] * (total / size + 1))


def _seconds(size: float, device: torch.device) -> float:
    buffer = torch.zeros(int(size * _MIB) // 4, device=device)
    synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found = []
    for _ in range(1 + (_MANY if size <= _SMALL else _FEW)):
        synchronize()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])  # the first sets up
