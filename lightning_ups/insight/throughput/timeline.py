"""Where the time of training steps goes, measured on the device and read some steps late.

A mark is a point in the order of the device's work: a CUDA event on the current stream, or the host's clock on a CPU.
The time between two marks is the device's, so that what the host does while the device is busy costs nothing, and
what the device waits for does, whoever it waits for. Nothing here waits: a step is read when its last mark has been
passed.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

__all__ = ["PHASES", "Clock", "EventClock", "HostClock", "Phase", "StepTime", "Timeline", "clock_for"]

Phase = Literal["data", "transfer", "forward", "backward", "optimizer", "other", "checkpoint", "validation"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_PAUSES: tuple[Phase, ...] = ("checkpoint", "validation")  # no part of a step, though they lie between two
_BETWEEN = -1


class Clock(Protocol):
    """Marks points in the order of the device's work."""

    def mark(self) -> Any:
        """Return a mark of now."""
        ...

    def passed(self, mark: Any) -> bool:
        """Return whether the device has come to ``mark``, without waiting for it."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the time between two marks that were passed."""
        ...

    def release(self, marks: list[Any]) -> None:
        """Take marks back that nobody needs any more."""

    def wait(self) -> None:
        """Wait until all marks are passed; not for use in a step."""


class HostClock:
    """The host's own clock, for devices that are the host."""

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def passed(self, mark: float) -> bool:
        """Return True: the host is where it is."""
        return True

    def seconds(self, first: float, second: float) -> float:
        """Return the time between two marks."""
        return second - first

    def release(self, marks: list[float]) -> None:
        """Do nothing: a number needs no return."""

    def wait(self) -> None:
        """Do nothing."""


class EventClock:
    """CUDA events on the current stream, used again and again."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        """Return an event that the device records when it comes here."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._last = event
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the event was recorded; CUDA answers at once."""
        return mark.query()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the time between two events, both of which were recorded."""
        return first.elapsed_time(second) / 1e3

    def release(self, marks: list[torch.cuda.Event]) -> None:
        """Keep them for later marks: making one costs more than recording it."""
        self._free.extend(marks)

    def wait(self) -> None:
        """Wait for the last event."""
        if self._last is not None:
            self._last.synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of ``device``."""
    return EventClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one optimizer step took.

    Args:
        number: Which step, from 0 where the timeline began, or -1 for a stretch between two that is no step.
        seconds: From its first mark to the next step's, without pauses.
        split: Seconds of each phase, in steps that were split; their sum is ``seconds``.
        pauses: Seconds that were no part of the step: validation and checkpoints, before the next one.
        note: What whoever ended the step said of it.
    """

    number: int
    seconds: float
    split: dict[Phase, float] | None
    pauses: dict[Phase, float]
    note: Any

    @property
    def between(self) -> bool:
        """Whether it is a stretch between two steps, such as the end of an epoch, and no step."""
        return self.number == _BETWEEN


@dataclass(slots=True)
class _Open:
    number: int
    splits: bool
    marks: list[Any] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)  # that begin at these marks
    note: Any = None


class Timeline:
    """Marks where steps and their phases begin, and tells later how long they were.

    Phases nest: time belongs to the innermost. Validation and checkpoints pause the step.

    Args:
        clock: What marks are made with.
        split_every: Of how many steps one is split into phases; every step has its length. A prime number does not fall
            in step with the workers of a loader.
        late: How many steps later a step is read at the earliest.
    """

    def __init__(self, clock: Clock, *, split_every: int = 1, late: int = 2) -> None:
        self._clock, self._split_every, self._late = clock, split_every, late
        self._inside: list[Phase] = ["other"]
        self._open: _Open | None = None
        self._ended: deque[tuple[_Open, Any]] = deque()
        self._count = 0

    @property
    def running(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open is not None

    def enter(self, phase: Phase) -> None:
        """Begin a phase within the phase that is now."""
        self._inside.append(phase)
        current = self._open
        if current is not None and (current.splits or phase in _PAUSES):
            current.marks.append(self._clock.mark())
            current.phases.append(phase)

    def leave(self) -> None:
        """End the innermost phase."""
        phase = self._inside.pop()
        current = self._open
        if current is not None and (current.splits or phase in _PAUSES):
            current.marks.append(self._clock.mark())
            current.phases.append(self._inside[-1])

    def step(self, note: Any = None) -> None:
        """End the step that runs, if one does, and begin the next, at one mark."""
        mark = self._clock.mark()
        self._end(mark, note)
        splits = self._count % self._split_every == 0
        self._open = _Open(self._count, splits, [mark], [self._inside[-1]])
        self._count += 1

    def end(self, note: Any = None) -> None:
        """End the step that runs, if one does; what follows is no part of any."""
        if self._open is not None:
            self._end(self._clock.mark(), note)
            self._open = None

    def rest(self, note: Any = None) -> None:
        """End the step that runs, and begin a stretch that is no step; it is read with its pauses and its length."""
        mark = self._clock.mark()
        self._end(mark, note)
        self._open = _Open(_BETWEEN, splits=False, marks=[mark], phases=[self._inside[-1]])

    def drop(self) -> None:
        """Forget the step that runs: something that does not belong to it happened."""
        if self._open is not None:
            self._clock.release(self._open.marks[1:])  # the first one ended the step before
            self._open = None

    def read(self) -> Iterator[StepTime]:
        """Yield the steps that the device has done, oldest first, without waiting for it."""
        while len(self._ended) > self._late and self._clock.passed(self._ended[0][1]):
            yield self._read_first()

    def finish(self) -> Iterator[StepTime]:
        """Yield all other steps, and wait for them: for the end of training."""
        self._clock.wait()
        while self._ended:
            yield self._read_first()

    def _end(self, mark: Any, note: Any) -> None:
        if self._open is not None:
            self._open.note = None if self._open.number == _BETWEEN else note
            self._ended.append((self._open, mark))

    def _read_first(self) -> StepTime:
        done, last = self._ended.popleft()
        marks = [*done.marks, last]
        spent: dict[Phase, float] = {}
        for phase, first, second in zip(done.phases, marks, marks[1:], strict=False):
            spent[phase] = spent.get(phase, 0.0) + self._clock.seconds(first, second)
        self._clock.release(done.marks)  # the last one is the next step's first, unless there is none
        pauses: dict[Phase, float] = {phase: spent.pop(phase) for phase in _PAUSES if phase in spent}
        return StepTime(done.number, sum(spent.values()), spent if done.splits else None, pauses, done.note)
