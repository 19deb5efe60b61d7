"""Choosing the fastest of several ways to run a step, by timing whole steps.

What a graph takes by itself does not tell how long a step takes in which it runs: the host may wait for the device in
between, or the data may be late. So whatever was chosen by parts is compared once more as a whole.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from lightning_ups.transforms.compile.mode import LEAST_OUTPUT, mib

WARM_STEPS, ROUNDS, TIMED_STEPS = 2, 3, 4
MORE_MEMORY = 0.05  # of what a step takes uncompiled
CLEARLY = 0.02  # of a step: what two measurements of one thing may differ by
MOST_REPEATS = 6  # of rounds that were interrupted


class StepClock(Protocol):
    """What of a `Clock` whole steps are timed by."""

    def now(self) -> float:
        """Return the host's time."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def peak(self) -> int:
        """Return the most bytes that all tensors have had at once."""
        ...

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def recorded(self) -> int:
        """Return the bytes that CUDA graphs keep to themselves, without those of tensors."""
        ...


class HostClock:
    """The time of a host that computes itself. Its memory is not counted."""

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter() * 1e3

    def wait(self) -> None:
        """Return at once."""

    def peak(self) -> int:
        """Return 0."""
        return 0

    def reset_peak(self) -> None:
        """Leave it."""

    def recorded(self) -> int:
        """Return 0."""
        return 0


class Contest:
    """Times ways to run a step, one after another.

    Not by turns, since CUDA graphs keep memory to themselves as soon as they are recorded. The peak of memory that the
    device counts is reset for each way.

    Args:
        clock: The times of the host and of the device.
        ways: Their names, in the order in which they are timed. ``usual`` wins, unless another is clearly faster or it
            takes more memory than the first.
        length: Batches of an optimizer step.
        spare: Bytes that a step uncompiled is expected to take beyond the first way.
        more: Bytes that any way may take beyond a step uncompiled, if that is more than 5 % of it.
        usual: One of the ways. None: the last one.
    """

    def __init__(
        self,
        clock: StepClock,
        ways: Sequence[str],
        *,
        length: int = 1,
        spare: int = 0,
        more: int = 0,
        usual: str | None = None,
    ) -> None:
        self._usual = usual or ways[-1]
        self._clock, self._length, self._spare, self._more = clock, length, spare, more
        self._times: dict[str, list[float]] = {way: [] for way in ways}
        self._memory: dict[str, int] = {}
        self._others = clock.recorded()
        self._batch, self._began = -1, 0.0  # of the present way
        self._interrupted, self._repeats = False, 0
        self.winner: str | None = None

    def begin_step(self) -> str:
        """Return the way in which the step that begins is to run; once there is a winner, that."""
        if self.winner is not None:
            return self.winner
        self._batch += 1
        step, between = divmod(self._batch, self._length)
        if step < WARM_STEPS or (step - WARM_STEPS) % TIMED_STEPS or between:
            return self._way
        self._clock.wait()
        now, way = self._clock.now(), self._way
        if self._interrupted and step > WARM_STEPS and self._repeats < MOST_REPEATS:
            self._batch -= self._length * TIMED_STEPS
            self._repeats += 1
            self._clock.reset_peak()
        elif step > WARM_STEPS:
            self._times[way].append((now - self._began) / (self._length * TIMED_STEPS))
        else:
            self._clock.reset_peak()
        self._began, self._interrupted = now, False
        if self._batch == self._length * (WARM_STEPS + ROUNDS * TIMED_STEPS):
            self._memory[way] = self._clock.peak() + self._clock.recorded() - self._others
            self._batch = 0
        if len(self._memory) == len(self._times):
            self.winner = self._fastest()
            return self.winner
        return self._way

    def interrupt(self) -> None:
        """Record that something else runs between two steps, as an evaluation: the round is timed once more."""
        self._interrupted = True

    @property
    def _way(self) -> str:
        return next(way for way, times in self._times.items() if len(times) < ROUNDS)

    def _fastest(self) -> str:
        first = next(iter(self._times))
        usual = self._memory[first] + self._spare
        most = usual + max(MORE_MEMORY * usual, LEAST_OUTPUT, self._more)
        ways = [way for way in self._times if way == first or self._memory[way] <= most]
        best = self._usual if self._usual in ways else ways[-1]
        for way in reversed(ways):
            won = sum(one < other for one, other in zip(self._times[way], self._times[best], strict=True))
            if won > ROUNDS / 2 and self.ms(way) < (1 - CLEARLY) * self.ms(best):
                best = way
        return best

    def ms(self, way: str) -> float:
        """Return how long a step takes at its best."""
        return min(self._times[way])

    def __str__(self) -> str:
        return ", ".join(f"{self.ms(way):.3g} ms {way} ({mib(self._memory[way])} MiB)" for way in self._times)
