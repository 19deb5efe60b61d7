"""What a look at a few steps, kernel by kernel, says: idle time, communication that nothing hides, copies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Inspection", "Kind", "Span", "kind_of", "look"]

Kind = Literal["communication", "copy", "compute"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that the device did, from ``start`` to ``end``, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Shares of the time that was looked at, and who made the host wait.

    Args:
        steps: How many steps were looked at.
        seconds: How long each took, with the looking.
        idle: The device did nothing.
        exposed_communication: It communicated and did nothing else.
        communication: It communicated, hidden or not.
        exposed_copies: It copied between host and device and did nothing else.
        waits: Lines of code at which the host waited for the device, and how often, most often first.
    """

    steps: int
    seconds: float
    idle: float | None = None
    exposed_communication: float | None = None
    communication: float | None = None
    exposed_copies: float | None = None
    waits: tuple[tuple[str, int], ...] = ()


def kind_of(name: str) -> Kind:
    """Return what sort of work a kernel of that ``name`` is."""
    lower = name.lower()
    if (
        "nccl" in lower
        or "nvshmem" in lower
        or lower.startswith(("symm_mem", "one_shot_all", "two_shot_all", "multimem_"))
    ):
        return "communication"
    if lower.startswith("memcpy htod") or lower.startswith("memcpy dtoh"):
        return "copy"
    return "compute"


def look(
    spans: Iterable[Span], *, steps: int, seconds: float | None = None, waits: Sequence[tuple[str, int]] = ()
) -> Inspection:
    """Return what ``spans`` of all streams say of ``steps`` steps.

    Args:
        spans: What the device did, in any order.
        steps: During how many steps.
        seconds: How long they took together; None: from the first span to the last.
        waits: Where the host waited.
    """
    by_kind: dict[Kind, list[tuple[float, float]]] = {"communication": [], "copy": [], "compute": []}
    for span in spans:
        by_kind[kind_of(span.name)].append((span.start, span.end))
    everything = [interval for intervals in by_kind.values() for interval in intervals]
    if not everything:
        return Inspection(steps=steps, seconds=(seconds or 0.0) / max(1, steps), waits=tuple(waits))
    measured = (max(end for _, end in everything) - min(start for start, _ in everything)) / 1e6
    whole = max(seconds or 0.0, measured)
    busy, compute = _covered(everything) / 1e6, by_kind["compute"]
    without_communication = _covered(compute + by_kind["copy"]) / 1e6
    without_copies = _covered(compute + by_kind["communication"]) / 1e6
    return Inspection(
        steps=steps,
        seconds=whole / max(1, steps),
        idle=max(0.0, 1 - busy / whole),
        exposed_communication=(busy - without_communication) / whole,
        communication=_covered(by_kind["communication"]) / 1e6 / whole,
        exposed_copies=(busy - without_copies) / whole,
        waits=tuple(waits),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
