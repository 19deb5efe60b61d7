"""Idle time, exposed communication and copies in a few profiled steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Inspection", "Kind", "Span", "inspect_spans", "kind_of"]

Kind = Literal["communication", "copy", "compute"]


@dataclass(frozen=True, slots=True)
class Span:
    """Work of the device, from ``start`` to ``end``, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Shares of the profiled time, and what made the host wait.

    Args:
        steps: How many steps were profiled.
        seconds: Seconds per step, with the profiler.
        idle: The device did nothing.
        exposed_communication: Only communication ran.
        communication: Communication ran, hidden or not.
        exposed_copies: Only copies between host and device ran.
        waits: Lines of code at which the host waited for the device, and how often, the most frequent first.
    """

    steps: int
    seconds: float
    idle: float | None = None
    exposed_communication: float | None = None
    communication: float | None = None
    exposed_copies: float | None = None
    waits: tuple[tuple[str, int], ...] = ()


def kind_of(name: str) -> Kind:
    """Return what kind of work a kernel of this name does."""
    lower = name.lower()
    if "nccl" in lower or "nvshmem" in lower:
        return "communication"
    if lower.startswith(("symm_mem", "one_shot_all", "two_shot_all", "multimem_")):
        return "communication"
    return "copy" if lower.startswith(("memcpy htod", "memcpy dtoh")) else "compute"


def inspect_spans(
    spans: Iterable[Span], *, steps: int, seconds: float | None = None, waits: Sequence[tuple[str, int]] = ()
) -> Inspection:
    """Return the shares of time in ``spans``.

    Args:
        spans: The work of all streams, in any order.
        steps: During how many steps.
        seconds: The duration of all steps. None: from the first span to the last.
        waits: Where the host waited.
    """
    by_kind: dict[Kind, list[tuple[float, float]]] = {"communication": [], "copy": [], "compute": []}
    for span in spans:
        by_kind[kind_of(span.name)].append((span.start, span.end))
    everything = [interval for intervals in by_kind.values() for interval in intervals]
    if not everything:
        return Inspection(steps=steps, seconds=(seconds or 0.0) / max(1, steps), waits=tuple(waits))
    measured = (max(end for _, end in everything) - min(start for start, _ in everything)) / 1e6
    total = max(seconds or 0.0, measured)

    def share(*kinds: Kind) -> float:
        return _covered(interval for kind in kinds for interval in by_kind[kind]) / 1e6 / total

    busy = share("communication", "copy", "compute")
    return Inspection(
        steps=steps,
        seconds=total / max(1, steps),
        idle=max(0.0, 1 - busy),
        exposed_communication=busy - share("copy", "compute"),
        communication=share("communication"),
        exposed_copies=busy - share("communication", "compute"),
        waits=tuple(waits),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
