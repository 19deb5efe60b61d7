"""Clocks of a host and a device that exist on paper, for what chooses by the times of the two."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Machine:
    """A host that launches kernels into a queue, and a device that works through it: a clock and a rehearsal at once.

    A forward and a backward launch ``kernels`` each; ``host`` and ``device`` are the milliseconds of one. ``slow``
    multiplies the host's time in the passes that it lists. A device that is held is held ``holding`` times as long.
    Until it is woken, the device takes ``sleepy`` times as long. ``waits`` says whether a pass waits for a result.
    """

    kernels: int = 50
    host: float = 0.05
    device: float = 0.02
    queue: int = 1000
    holding: float = 1.0
    sleepy: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)
    inputs: tuple = ()
    returned: torch.Tensor = field(default_factory=lambda: torch.zeros(4))
    saved: int = 3 * 2**20
    free: int = 2**33
    waits: bool = False

    def __post_init__(self):
        self.time, self.done, self.passes, self.held, self.live = 0.0, [0.0], 0, 0, 0

    def _launch(self):
        for _ in range(self.kernels):
            if len(self.done) >= self.queue:  # a full queue lets the host wait
                self.time = max(self.time, self.done[-self.queue])
            self.time += self.host * self.slow.get(self.passes, 1)
            self.done.append(max(self.time, self.done[-1]) + self.device * self.sleepy)
        self.passes += 1

    def wake(self):
        self.sleepy = 1.0

    def forward(self):
        self._launch()
        self.live = self.saved
        return [self.returned]

    def backward(self, outputs):
        assert outputs
        self._launch()
        self.live = 0

    def now(self):
        return self.time

    def wait(self):
        self.time = max(self.time, self.done[-1])

    def mark(self):
        return max(self.time, self.done[-1])

    def passed(self, mark):
        return mark <= self.time

    def between(self, start, end):
        return end - start

    def hold(self, ms):
        self.held += 1
        self.done.append(max(self.time, self.done[-1]) + ms * self.holding)

    def counted(self, run):
        before = len(self.done)
        run()
        count = len(self.done) - before
        return None if self.waits else (count, count * self.device * self.sleepy)

    def allocated(self):
        return self.live

    def room(self):
        return self.free

    def peak(self):
        return 2**30

    def recorded(self):
        return 0

    def reset_peak(self):
        pass

    def release(self):
        pass


class FixedClock:
    """Says that each forward and backward together are launched in ``launch`` ms and computed in ``device`` ms."""

    def __init__(self, launch, device, *, free=2**33):
        self.launch, self.device, self.free = launch, device, free
        self.time, self.held, self.measured = 0.0, False, 0

    def wake(self):
        pass

    def now(self):
        self.time += self.launch / 2  # asked before the forward, after it, and after the backward
        return self.time

    def wait(self):
        pass

    def mark(self):
        return None

    def passed(self, mark):
        return False

    def between(self, start, end):
        self.measured += 1
        held, self.held = self.held, False
        return self.device / 2 if held else max(self.launch, self.device)

    def hold(self, ms):
        self.held = True

    def counted(self, run):
        return None

    def allocated(self):
        return 0

    def room(self):
        return self.free

    def peak(self):
        return 2**30

    def recorded(self):
        return 0

    def reset_peak(self):
        pass

    def release(self):
        pass


class HostClock(FixedClock):
    """The host's time, with a device that is never behind and takes as long as it is said to."""

    def __init__(self, launch=0.2, device=2.0):
        super().__init__(launch, device)
        self.ahead = 0.0

    def now(self):
        return time.perf_counter() * 1e3 + self.ahead
