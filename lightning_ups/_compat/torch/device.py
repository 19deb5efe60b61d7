"""A GPU's memory, clock and work: the allocator's counters, times on the device, kernels, and where the host waits."""

import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_ups._compat.patches import applied

__all__ = [
    "CudaClock",
    "Kernels",
    "allocator_counters",
    "begin_history",
    "between_marks",
    "device_memory",
    "end_history",
    "is_profiled",
    "watched_waits",
    "write_snapshot",
]


def allocator_counters(device: torch.device) -> dict[str, int]:
    """Return the counters of the allocator for ``device``, without waiting for the device; none if it has none."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" and torch.cuda.is_initialized() else {}


def device_memory(device: torch.device) -> int | None:
    """Return the memory of ``device`` in bytes, or None if it is not a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def begin_history(device: torch.device) -> None:
    """Record where allocations come from, from now on; each then costs some microseconds."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000, device=device)


def end_history(device: torch.device) -> None:
    """Record no more."""
    if device.type == "cuda":
        options: dict[str, Any] = {"enabled": None, "device": device}
        torch.cuda.memory._record_memory_history(**options)


def write_snapshot(path: Path, device: torch.device) -> bool:
    """Write every block of the allocator's memory to ``path``, and return whether there was one to ask."""
    if device.type != "cuda":
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


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

    def counted(self, run: Callable[[], Any]) -> tuple[int, float] | None:
        """Return how many kernels ``run`` launches and the milliseconds that they take; None if it waits for one.

        None as well if somebody profiles the process.
        """
        if is_profiled():
            return None
        waits, profiler = Counter[str](), Kernels()
        profiler.start()
        try:
            with watched_waits(waits):
                run()
        finally:
            kernels = profiler.stop()
        if waits:
            return None
        return len(kernels), sum(end - start for _, start, end in kernels) / 1e3

    def peak(self) -> int:
        """Return the most bytes that all tensors have had at once."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""
        torch.cuda.empty_cache()

    def recorded(self) -> int:
        """Return the bytes that CUDA graphs keep to themselves, without those of tensors."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == index)
        private = (s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
        return sum(s["total_size"] - s["allocated_size"] for s in private)

    def _time_of_spin(self) -> float:
        start = self.mark()
        self._spin(_CALIBRATION)
        end = self.mark()
        self.wait()
        return self.between(start, end)

    def _spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)


Kernel = tuple[str, float, float]  # name, start and end in microseconds


def is_profiled() -> bool:
    """Return whether somebody profiles this process by torch's profiler, of which there is one."""
    bindings: Any = torch._C
    return bindings._autograd._profiler_enabled()


class Kernels:
    """Torch's profiler, for the device's work only."""

    def __init__(self) -> None:
        with warnings.catch_warnings():  # about events of several cycles, of which there is one
            warnings.simplefilter("ignore")
            self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin; it takes up to a second the first time in a process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profile.start()

    def mark(self) -> None:
        """Mark a point in the device's work; what is returned lies between the first mark and the last."""
        torch.cuda._sleep(1)  # a kernel that nobody else uses

    def stop(self) -> list[Kernel]:
        """End, and return what the device did, in any order. This waits for the device."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profile.stop()
        return between_marks(
            (event.name, event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        )


def between_marks(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the parts of ``kernels`` between the first mark and the last; all of them, if there are not two marks."""
    kernels = list(kernels)
    marks = sorted(start for name, start, _ in kernels if "spin_kernel" in name)
    if len(marks) < 2:
        return kernels
    first, last = marks[0], marks[-1]
    return [(name, max(start, first), min(end, last)) for name, start, end in kernels if start <= last and end >= first]


@contextmanager
def watched_waits(counts: "Counter[str]") -> Iterator[None]:
    """Count, while the context is open, at which lines the host waits for the device; nothing is printed.

    Torch itself says where (``torch.cuda.set_sync_debug_mode``), but for explicit ``torch.cuda.synchronize``, which is
    watched here.
    """
    mode = torch.cuda.get_sync_debug_mode()

    def note() -> None:
        if (place := _place()) is not None:
            counts[place] += 1

    def showing(stock: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                note()
            elif "Synchronization debug mode" not in str(message):
                stock(message, *args, **kwargs)

        return show

    def synchronizing(stock: Callable[..., None]) -> Callable[..., None]:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            note()
            stock(*args, **kwargs)

        return synchronize

    with (
        warnings.catch_warnings(),
        applied("warnings:showwarning", showing),
        applied("torch.cuda:synchronize", synchronizing),
    ):
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        warnings.filterwarnings("always", message=".*Synchronization debug mode.*")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[2])


def _place() -> str | None:
    """Return the line that waits: the innermost of the user's, or that of a library if none is."""
    frames = [frame for frame in traceback.extract_stack(sys._getframe(2)) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.endswith("/warnings.py")]
    if not frames:
        return None
    # The script that called fit is the user's as well: what a step does lies below the last frame of Lightning.
    below = max((i for i, frame in enumerate(frames) if _is_lightning(frame.filename)), default=-1) + 1
    own = [frame for frame in frames[below:] if not _is_library(frame.filename)]
    chosen = (own or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno} ({chosen.name})"


def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _OURS))


def _is_lightning(path: str) -> bool:
    return _is_library(path) and (path.startswith(_OURS) or "/lightning/" in path or "/pytorch_lightning/" in path)
