"""Rates, percentiles, the split of a step and utilisation, from the times of steps and from profiled ones."""

import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import override

from lightning_ups.insight.throughput.timeline import PAUSES, PHASES, StepTime

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of one unit (such as a token) on one device, and the peak of the device.

    Args:
        model: Required by the model, for MFU.
        hardware: Including recomputation, for HFU.
        low_precision: The part of ``model`` in fp8.
        peak: FLOP/s of the device in the dtype of the rest; None: unknown.
        low_precision_peak: FLOP/s of the device in fp8.
    """

    model: float
    hardware: float
    low_precision: float = 0.0
    peak: float | None = None
    low_precision_peak: float | None = None

    def utilisation(self, units_per_s: float) -> dict[str, float]:
        """Return MFU and HFU of one device at this rate, and MFU with the fp8 part compared with the fp8 peak."""
        if self.peak is None:
            return {}
        found = {"mfu": units_per_s * self.model / self.peak, "hfu": units_per_s * self.hardware / self.peak}
        if self.low_precision and self.low_precision_peak:
            rest = (self.model - self.low_precision) / self.peak
            found["mfu_mixed"] = units_per_s * (rest + self.low_precision / self.low_precision_peak)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The measurements of one rank, as plain values for a collective."""

    steps: int
    seconds: float
    units: float
    split: Mapping[str, float]
    split_seconds: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run. None: not measured.

    Shares are of a step. ``uneven`` is the share of all steps' time in excess of the median. ``pauses``, ``between_s``
    (between epochs, without pauses) and ``start_s`` (until the first step is done) are seconds. Memory is in bytes.
    """

    unit: str
    device: str
    num_devices: int
    steps: int
    warmup_steps: int
    units_per_s: float | None = None
    units_per_s_per_device: float | None = None
    units_per_step: float | None = None
    step_s: float | None = None
    step_p95_s: float | None = None
    uneven: float = 0.0
    split: Mapping[str, float] = field(default_factory=dict)
    split_steps: int = 0
    pauses: Mapping[str, float] = field(default_factory=dict)
    between_s: float = 0.0
    start_s: float | None = None
    fit_s: float | None = None
    inspection: Inspection | None = None
    flops: Flops | None = None
    utilisation: Mapping[str, float] = field(default_factory=dict)
    why_no_mfu: str = ""
    memory: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, Any] = field(default_factory=dict)
    single_device: float | None = None
    ranks: Sequence[RankTimes] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether the run computes on CPUs."""
        return self.device == "cpu"

    @property
    def scaling(self) -> float | None:
        """The rate as a share of ``num_devices`` times the given rate of a single device."""
        if self.single_device is None or self.units_per_s is None:
            return None
        return self.units_per_s / (self.single_device * self.num_devices)

    @property
    def slowest_rank(self) -> tuple[int, float] | None:
        """The rank with the most work of its own in a step, and how much longer it takes than the others."""
        own = [_own_work(rank) for rank in self.ranks]
        if len(own) < 2 or not all(own):
            return None
        worst = max(range(len(own)), key=own.__getitem__)
        return worst, own[worst] / _of_others(own, worst) - 1

    @property
    def waited_for(self) -> float:
        """The share of a step in which the other ranks wait for the slowest."""
        if self.slowest_rank is None:
            return 0.0
        worst, own = self.slowest_rank[0], [_own_work(rank) for rank in self.ranks]
        step = statistics.median(rank.split_seconds / max(1, rank.steps) for rank in self.ranks)
        return (own[worst] - _of_others(own, worst)) / step if step else 0.0


def _of_others(own: Sequence[float], worst: int) -> float:
    return statistics.median([seconds for rank, seconds in enumerate(own) if rank != worst])


def _own_work(rank: RankTimes) -> float:
    # Ranks wait for each other in backward and in the optimizer step. The phases before are their own work.
    return sum(rank.split.get(phase, 0.0) for phase in ("data", "transfer", "forward", "other")) / max(1, rank.steps)


class _Sums:
    """Sums over steps."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.units = 0.0
        self.split: dict[str, float] = {phase: 0.0 for phase in PHASES if phase not in PAUSES}
        self.split_seconds, self.split_steps = 0.0, 0

    def add(self, step: StepTime) -> None:
        self.seconds.append(step.seconds)
        self.units += float(step.note)
        if step.split is not None:
            self.split_steps += 1
            self.split_seconds += step.seconds
            for phase, seconds in step.split.items():
                self.split[phase] += seconds


class Meter(_Sums):
    """Sums up steps, for the run and for the window since the last log.

    Args:
        warmup_steps: Steps at the beginning that do not count: they compile, allocate, and fill caches.
        share: The share of a batch's units that one device computes, such as a half with tensor parallelism over two.
        replicas: The number of data-parallel replicas.
    """

    def __init__(self, *, warmup_steps: int, share: float = 1.0, replicas: int = 1) -> None:
        super().__init__()
        self.warmup_steps, self.share, self.replicas = warmup_steps, share, replicas
        self._counted: list[list[int]] = []  # the numbers of counted steps: first and last of each stretch
        self._least, self._most = float("inf"), 0.0  # units of a step
        self.pauses: dict[str, float] = dict.fromkeys(PAUSES, 0.0)
        self.between = 0.0
        self._window = _Sums()

    @override
    def add(self, step: StepTime) -> None:
        """Count a step. Its note is its number of units, or None if it does not count."""
        for phase, seconds in step.pauses.items():
            self.pauses[phase] += seconds
        if step.between:
            self.between += step.seconds
        if step.note is None or step.number < self.warmup_steps:
            return
        super().add(step)
        if self._counted and self._counted[-1][1] == step.number - 1:
            self._counted[-1][1] = step.number
        else:
            self._counted.append([step.number, step.number])
        self._window.add(step)
        units = float(step.note)
        self._least, self._most = min(self._least, units), max(self._most, units)

    @property
    def numbers(self) -> Iterator[int]:
        """The numbers of the counted steps in the timeline."""
        return (number for first, last in self._counted for number in range(first, last + 1))

    @property
    def total_s(self) -> float:
        """Seconds of all counted steps."""
        return sum(self.seconds)

    @property
    def uneven(self) -> float:
        """The share of all steps' time in excess of the median; 0 if the steps differ in size."""
        if not self.seconds or self._most > 1.1 * self._least:
            return 0.0
        return max(0.0, 1 - statistics.median(self.seconds) * len(self.seconds) / self.total_s)

    def per_device(self, units: float, seconds: float) -> float:
        """Return the rate of one device."""
        return units * self.share / seconds

    def window(self) -> dict[str, float]:
        """Return the figures of the steps since the last call, times in milliseconds; empty without steps."""
        window, self._window = self._window, _Sums()
        total = sum(window.seconds)
        if total <= 0:
            return {}
        found = {
            "units_per_s": window.units * self.replicas / total,
            "units_per_s_per_device": self.per_device(window.units, total),
            "step_ms": statistics.median(window.seconds) * 1e3,
            "step_p95_ms": quantile(window.seconds, 0.95) * 1e3,
        }
        for phase, seconds in window.split.items() if window.split_steps else ():
            found[f"{phase}_ms"] = seconds / window.split_steps * 1e3
        return found

    def shares(self) -> dict[str, float]:
        """Return the share of each phase in split steps."""
        if not self.split_seconds:
            return {}
        return {phase: seconds / self.split_seconds for phase, seconds in self.split.items()}

    def own(self) -> RankTimes:
        """Return the measurements of this rank."""
        return RankTimes(
            steps=self.split_steps,
            seconds=self.total_s,
            units=self.units,
            split=dict(self.split),
            split_seconds=self.split_seconds,
        )


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest of ``values`` that is not exceeded by ``share`` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


# Profiled steps


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
