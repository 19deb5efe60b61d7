"""The time of training steps and their phases, measured on the device and read some steps later, without waiting.

A mark is a point in the device's queue: a CUDA event on the current stream, or the host's time on a CPU. Time between
two marks is device time: work of the host counts only if the device waits for it.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from typing_extensions import override

Phase = Literal["data", "transfer", "forward", "backward", "optimizer", "other", "checkpoint", "validation"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PAUSES: tuple[Phase, ...] = ("checkpoint", "validation")  # not part of a step
_BETWEEN = -1
_ACTIONS: tuple[tuple[str, str, Phase], ...] = (  # the beginning and end of an action's name in Lightning's profiler
    ("[", "].train_dataloader_next", "data"),
    ("[Strategy]", ".batch_to_device", "transfer"),
    ("[Strategy]", ".training_step", "forward"),
    ("[Strategy]", ".backward", "backward"),
    ("[LightningModule]", ".optimizer_step", "optimizer"),
    ("optimizer_step", "optimizer_step", "optimizer"),  # under manual optimization
    ("save_checkpoint", "save_checkpoint", "checkpoint"),
    # Reported before validation starts the workers of its loaders. Its end is not reported.
    ("[LightningModule]", ".on_validation_model_zero_grad", "validation"),
)


def phase_of(action: str) -> Phase | None:
    """Return the phase that an action of Lightning's profiler begins, or None."""
    return next((phase for start, end, phase in _ACTIONS if action.startswith(start) and action.endswith(end)), None)


class Clock:
    """Marks points in the device's queue. On a CPU they are the host's time."""

    def mark(self) -> Any:
        """Return a new mark."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return whether the device has reached ``mark``, without waiting for it."""
        return True

    def seconds(self, first: Any, second: Any) -> float:
        """Return the time between two marks that were passed."""
        return second - first

    def release(self, marks: list[Any]) -> None:
        """Take back marks that are no longer needed."""

    def wait(self) -> None:
        """Wait until all marks are passed; not for use in a step."""


class EventClock(Clock):
    """CUDA events on the current stream, which are reused."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None

    @override
    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._last = event
        return event

    @override
    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    @override
    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1e3

    @override
    def release(self, marks: list[torch.cuda.Event]) -> None:
        self._free.extend(marks)

    @override
    def wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of ``device``."""
    return EventClock() if device.type == "cuda" else Clock()


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one optimizer step.

    Args:
        number: The number of the step in the timeline, from 0; -1 for the time between two steps.
        seconds: From its first mark to that of the next step, without pauses.
        split: Seconds of each phase, if the step was split; their sum is ``seconds``.
        pauses: Seconds of validation and checkpoints before the next step.
        note: The note given at the end of the step.
    """

    number: int
    seconds: float
    split: dict[Phase, float] | None
    pauses: dict[Phase, float]
    note: Any

    @property
    def between(self) -> bool:
        """Whether it is not a step but the time between two, such as the end of an epoch."""
        return self.number == _BETWEEN


@dataclass(slots=True)
class _Open:
    number: int
    splits: bool
    marks: list[Any] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)  # that begin at these marks
    note: Any = None


class Timeline:
    """Marks the beginning of steps and their phases, and returns their times later.

    Phases nest: time belongs to the innermost one. Validation and checkpoints pause the step.

    Args:
        clock: Creates the marks.
        split_every: One of so many steps is split into phases. A prime number does not coincide with the number of
            workers of a loader.
        late: The least number of steps after which a step is read.
    """

    def __init__(self, clock: Clock, *, split_every: int = 1, late: int = 2) -> None:
        self._clock, self._split_every, self._late = clock, split_every, late
        self._inside: list[Phase] = ["other"]
        self._open: _Open | None = None
        self._ended: deque[tuple[_Open, Any]] = deque()
        self._count = 0

    @property
    def running(self) -> bool:
        """Whether a step is open."""
        return self._open is not None

    def enter(self, phase: Phase) -> None:
        """Begin a phase inside the current one."""
        self._inside.append(phase)
        current = self._open
        if current is not None and (current.splits or phase in PAUSES):
            current.marks.append(self._clock.mark())
            current.phases.append(phase)

    def leave(self) -> None:
        """End the innermost phase."""
        phase = self._inside.pop()
        current = self._open
        if current is not None and (current.splits or phase in PAUSES):
            current.marks.append(self._clock.mark())
            current.phases.append(self._inside[-1])

    def step(self, note: Any = None) -> None:
        """End the open step, if there is one, and begin the next, at one mark."""
        mark = self._clock.mark()
        self._end(mark, note)
        splits = self._count % self._split_every == 0
        self._open = _Open(self._count, splits, [mark], [self._inside[-1]])
        self._count += 1

    def end(self, note: Any = None) -> None:
        """End the open step, if there is one, and begin none."""
        if self._open is not None:
            self._end(self._clock.mark(), note)
            self._open = None

    def rest(self, note: Any = None) -> None:
        """End the open step, and measure the time until the next one, with its pauses."""
        mark = self._clock.mark()
        self._end(mark, note)
        self._open = _Open(_BETWEEN, splits=False, marks=[mark], phases=[self._inside[-1]])

    def drop(self) -> None:
        """Discard the open step, since something happened that is not part of it."""
        if self._open is not None:
            self._clock.release(self._open.marks[1:])  # the first one ended the step before
            self._open = None

    def read(self) -> Iterator[StepTime]:
        """Yield the steps that the device has finished, oldest first, without waiting for it."""
        while len(self._ended) > self._late and self._clock.passed(self._ended[0][1]):
            yield self._read_first()

    def finish(self) -> Iterator[StepTime]:
        """Wait for all other steps and yield them, at the end of training."""
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
        pauses: dict[Phase, float] = {phase: spent.pop(phase) for phase in PAUSES if phase in spent}
        return StepTime(done.number, sum(spent.values()), spent if done.splits else None, pauses, done.note)
