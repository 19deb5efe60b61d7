"""Choosing between launching a model's kernels one by one and replaying a recording of them, by measuring both sides.

A recording, a CUDA graph, spares the host nearly all of its work and the device nothing. So it pays where the host
takes longer to launch than the device to compute, and only there. The two times must not be mixed: a device that waits
for the host is busy, by events around its work, for as long as the host takes. So it is held up until all is queued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

from lightning_ups.transforms.compile.cuda_graphs import owned, size
from lightning_ups.transforms.compile.trial import Rehearsal

# Of the device's time. Above the one, the host is certainly too slow, since a loop does more than launch; below the
# other, what launching costs is hidden whatever else the loop does. Between them whole steps are timed.
LAUNCH_SHARE, HIDDEN_SHARE = 0.75, 0.25
LEAST_GAIN = 0.03  # of a step, so that it is worth recording
# Of the device's time. A host that takes longer for a step leaves the device waiting now and then, and gaps between its
# kernels. That shows in whole steps alone, so graphs are recorded for the comparison of these.
NEAR_SHARE = 0.85
COPY_MS = 2.0 / 2**30  # for each byte that is copied out of a graph's memory: a GPU that moves 1 TB/s
OUTPUT_SHARE, LEAST_OUTPUT = 0.5, 32 * 2**20  # of the peak of memory, and bytes: beyond it nothing is recorded
PACED_STEPS = 5
SAVED_SHARE = 0.25  # of the memory that is left: a recording keeps what it saves, and its peak, to itself

_ROUNDS, _HELD_ROUNDS = 5, 3
_FAR_BELOW = 0.25  # a host so much faster than the device needs no second look
_QUEUE = 500  # kernels: fewer fit into a device's queue
_STRETCHES = (2, 6, 18)  # times the host's time, for which the device is held


class Clock(Protocol):
    """The times of a host and of its device, in milliseconds."""

    def wake(self) -> None:
        """Let a device that was idle come to the speed that it has in a run."""

    def now(self) -> float:
        """Return the host's time."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def mark(self) -> Any:
        """Mark the present end of the device's queue."""

    def passed(self, mark: Any) -> bool:
        """Return whether the device has come to ``mark``."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Return the device's time from ``start`` to ``end``, which have both passed."""
        ...

    def hold(self, ms: float) -> None:
        """Keep the device busy for about so long."""

    def counted(self, run: Callable[[], Any]) -> tuple[int, float] | None:
        """Return how many kernels ``run`` launches and what they take; None if it waits for one, or if unknown."""
        ...

    def allocated(self) -> int:
        """Return the bytes of all tensors on the device."""
        ...

    def room(self) -> int:
        """Return the bytes that tensors could still have."""
        ...

    def peak(self) -> int:
        """Return the most bytes that all tensors have had at once."""
        ...

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def recorded(self) -> int:
        """Return the bytes that CUDA graphs keep to themselves, without those of tensors."""
        ...

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What a forward and a backward of a graph take.

    Args:
        launch_ms: How long the host launches.
        device_ms: How long the device computes; None if that could not be measured.
        saved_bytes: What lies between forward and backward.
        output_bytes: What is copied of what the graph returns.
        room: The bytes that tensors could still have.
        peak: The most bytes that tensors have had.
        step_ms: How long the host takes for a whole step, if that was timed.
    """

    launch_ms: float
    device_ms: float | None
    saved_bytes: int
    output_bytes: int
    room: int
    peak: int
    step_ms: float | None = None

    @property
    def copies_ms(self) -> float:
        """How long the device would take to copy what the graph returns out of the graph's memory."""
        return self.output_bytes * COPY_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Whether CUDA graphs are replayed, and why.

    Args:
        graphs: Whether.
        why: The reason, to follow the word "since".
        timing: What was measured, if anything was.
    """

    graphs: bool
    why: str
    timing: Timing | None = None

    def __str__(self) -> str:
        return f"mode auto: {'CUDA graphs' if self.graphs else 'default'}, since {self.why}"

    @property
    def facts(self) -> dict[str, Any]:
        """All of it as values that JSON knows."""
        facts: dict[str, Any] = {"mode": "reduce-overhead" if self.graphs else "default", "why": self.why}
        if self.timing is not None:
            facts |= {
                "launch_ms": round(self.timing.launch_ms, 3),
                "device_ms": None if self.timing.device_ms is None else round(self.timing.device_ms, 3),
                "step_ms": None if self.timing.step_ms is None else round(self.timing.step_ms, 3),
                "output_bytes": self.timing.output_bytes,
                "saved_bytes": self.timing.saved_bytes,
            }
        return facts


def together(timings: Sequence[Timing]) -> Timing:
    """Return what several graphs of one step take."""
    devices = [timing.device_ms for timing in timings]
    return Timing(
        launch_ms=sum(timing.launch_ms for timing in timings),
        device_ms=None if None in devices else sum(filter(None, devices)),
        saved_bytes=sum(timing.saved_bytes for timing in timings),
        output_bytes=sum(timing.output_bytes for timing in timings),
        room=min(timing.room for timing in timings),
        peak=max(timing.peak for timing in timings),
    )


def choose(timing: Timing) -> Choice:
    """Return what suits a model whose graphs take ``timing`` in a step."""
    return Choice(graphs=(refusal := _refusal(timing)) is None, why=refusal or _compared(timing), timing=timing)


def is_open(timing: Timing) -> bool:
    """Return whether the choice depends on how long the host takes for a whole step, which was not timed."""
    if timing.device_ms is None or timing.step_ms is not None:
        return False
    is_likely = timing.launch_ms > HIDDEN_SHARE * timing.device_ms
    return is_likely and not _is_certain(timing, timing.device_ms) and _forbidden(timing) is None


def unfit(timing: Timing) -> str | None:
    """Return why a graph that takes ``timing`` is not recorded, whatever else runs in the step, or None."""
    if timing.device_ms is None:
        launched = f"{timing.launch_ms:.3g} ms of work were launched"
        return f"the device did not wait while {launched}, and its own time is not known"
    copies = 2 * timing.output_bytes  # of outputs, and of the gradients that come back
    if copies > max(OUTPUT_SHARE * timing.peak, LEAST_OUTPUT):
        return f"copies of what it returns would take {mib(copies)} MiB beside {mib(timing.peak)}"
    return None


def _refusal(timing: Timing) -> str | None:
    if timing.device_ms is None:
        return unfit(timing)
    return _forbidden(timing) if _pays(timing, timing.device_ms) else _compared(timing)


def _pays(timing: Timing, device: float) -> bool:
    if _is_certain(timing, device):
        return True
    if (step := timing.step_ms) is None:
        return False
    if step > NEAR_SHARE * device and timing.launch_ms > HIDDEN_SHARE * device and _copies_little(timing, device):
        return True
    # Whoever is slower sets the pace.
    now, then = max(step, device), max(step - timing.launch_ms, device + timing.copies_ms)
    return then <= (1 - LEAST_GAIN) * now


def _is_certain(timing: Timing, device: float) -> bool:
    gains_enough = _copies_little(timing, device) or timing.launch_ms > device + timing.copies_ms
    return timing.launch_ms > LAUNCH_SHARE * device and gains_enough


def _copies_little(timing: Timing, device: float) -> bool:
    return timing.copies_ms < LEAST_GAIN * device


def _forbidden(timing: Timing) -> str | None:
    kept = timing.saved_bytes + timing.output_bytes  # outputs are copied
    if kept > SAVED_SHARE * timing.room:
        return (
            f"a graph would keep {mib(kept)} MiB of activations and outputs to itself, and {mib(timing.room)} MiB"
            " are free"
        )
    return None


def _compared(timing: Timing) -> str:
    launch, device = f"launching takes {timing.launch_ms:.3g} ms", f"the device {timing.device_ms:.3g}"
    if timing.copies_ms > 0.1:
        device += f" and {timing.copies_ms:.3g} more for copies of what the model returns"
    if timing.step_ms is None:
        return f"{launch} and {device}"
    return f"{launch}, {device}, and the host {timing.step_ms:.3g} for a whole step"


def mib(size: int) -> str:
    """Return ``size``, in bytes, in MiB."""
    return f"{size / 2**20:.0f}"


class Pace:
    """How long the host takes for a whole step, whatever the device does: each begins with a device that is idle."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: list[float] = []
        self._began: float | None = None

    def begin_step(self) -> float | None:
        """Wait for the device at the beginning of a step; return the step time in ms once enough steps are timed."""
        if self._began is not None:
            self._times.append(self._clock.now() - self._began)
        if len(self._times) == PACED_STEPS:
            return median(self._times)
        self._clock.wait()
        self._began = self._clock.now()
        return None


def measure(rehearsal: Rehearsal, clock: Clock) -> Timing:
    """Return what ``rehearsal``, which has run before, takes."""
    clock.wake()  # it has waited while the model was compiled
    before = clock.allocated()
    outputs = rehearsal.forward()
    saved = clock.allocated() - before
    returned = size(owned(outputs, rehearsal.inputs))
    rehearsal.backward(outputs)
    del outputs
    rounds = [_round(rehearsal, clock)]  # the first is thrown away, unless it says enough
    if sum(rounds[0].launch) > _FAR_BELOW * rounds[0].elapsed:
        rounds = [_round(rehearsal, clock) for _ in range(_ROUNDS)]
    launch = [median(halves) for halves in zip(*(r.launch for r in rounds), strict=True)]
    device = _device_time(rehearsal, clock, launch) if len(rounds) > 1 else rounds[0].elapsed
    return Timing(
        launch_ms=sum(launch),
        device_ms=device,
        saved_bytes=saved,
        output_bytes=returned,
        room=clock.room(),
        peak=clock.peak(),
    )


@dataclass(frozen=True)
class _Round:
    launch: tuple[float, float]  # of the forward and of the backward
    elapsed: float  # on the device, the time in which it had nothing to do included


def _round(rehearsal: Rehearsal, clock: Clock) -> _Round:
    clock.wait()
    begin = clock.mark()
    start = clock.now()
    outputs = rehearsal.forward()
    middle = clock.now()
    rehearsal.backward(outputs)
    end = clock.now()
    last = clock.mark()
    clock.wait()
    return _Round((middle - start, end - middle), clock.between(begin, last))


def _device_time(rehearsal: Rehearsal, clock: Clock, launch: Sequence[float]) -> float | None:
    """Return what the device takes for itself, or None if that is unknown."""
    for stretch in _STRETCHES:
        times: list[float] = []
        while len(times) < _HELD_ROUNDS:
            # Each half by itself: a queue takes about a thousand kernels, and then the host waits for the device.
            outputs, forward = _held(rehearsal.forward, clock, stretch * launch[0] + 1)
            _, backward = _held(partial(rehearsal.backward, outputs), clock, stretch * launch[1] + 1)
            if forward is None or backward is None:
                break
            times.append(forward + backward)
        else:
            return median(times)
    # Either the host waits for a result, and then there is nothing to record, or the queue is full.
    found = clock.counted(lambda: rehearsal.backward(rehearsal.forward()))
    return None if found is None or found[0] < _QUEUE else found[1]


def _held(run: Callable[[], Any], clock: Clock, ms: float) -> tuple[Any, float | None]:
    clock.wait()
    clock.hold(ms)
    start = clock.mark()
    result = run()
    began = clock.passed(start)
    end = clock.mark()
    clock.wait()
    return result, None if began else clock.between(start, end)
