"""The time of a CUDA device, apart from the time of the host that gives it work."""

import time

import torch

__all__ = ["CudaClock"]

_CALIBRATION = 2_000_000  # cycles: about a millisecond
_WAKING_MS = 50.0  # of work, by which a device that was idle, as while a model is compiled, has raised its frequency


class CudaClock:
    """Times what the host does and what the device does, and can keep the device from beginning.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_ms: float | None = None

    def wake(self) -> None:
        """Keep the device busy until it computes as fast as it does in a run, which takes some 50 ms."""
        worked = spin = 0.0
        while worked < _WAKING_MS:  # the first one loads the kernel
            spin = max(self._time_of_spin(), 1e-3)
            worked += spin
        self._cycles_per_ms = _CALIBRATION / spin

    def now(self) -> float:
        """Return the host's time in milliseconds."""
        return time.perf_counter() * 1e3

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        """Mark the present end of the device's queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has come to ``mark``."""
        return mark.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the milliseconds from ``start`` to ``end`` on the device; both must have passed."""
        return start.elapsed_time(end)

    def hold(self, ms: float) -> None:
        """Keep the device busy for about ``ms`` milliseconds; what is queued afterwards waits for that."""
        if self._cycles_per_ms is None:
            self.wake()
        assert self._cycles_per_ms is not None
        self._spin(int(ms * self._cycles_per_ms))

    def allocated(self) -> int:
        """Return the bytes of all tensors on the device."""
        return torch.cuda.memory_allocated(self._device)

    def room(self) -> int:
        """Return the bytes that tensors could still have."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def _time_of_spin(self) -> float:
        start = self.mark()
        self._spin(_CALIBRATION)
        end = self.mark()
        self.wait()
        return self.between(start, end)

    def _spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)
