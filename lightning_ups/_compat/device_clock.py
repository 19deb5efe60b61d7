"""The time of a CUDA device, apart from the time of the host that gives it work."""

import time

import torch

__all__ = ["CudaClock"]

_CALIBRATION = 2_000_000  # cycles: about a millisecond


class CudaClock:
    """Times what the host does and what the device does, and can keep the device from beginning.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_ms: float | None = None

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
            self._cycles_per_ms = self._calibrate()
        self._spin(int(ms * self._cycles_per_ms))

    def allocated(self) -> int:
        """Return the bytes of all tensors on the device."""
        return torch.cuda.memory_allocated(self._device)

    def room(self) -> int:
        """Return the bytes that tensors could still have."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def _calibrate(self) -> float:
        self._time_of_spin()  # which loads the kernel
        return _CALIBRATION / max(self._time_of_spin(), 1e-3)

    def _time_of_spin(self) -> float:
        start = self.mark()
        self._spin(_CALIBRATION)
        end = self.mark()
        self.wait()
        return self.between(start, end)

    def _spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)
