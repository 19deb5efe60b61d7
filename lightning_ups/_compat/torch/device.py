"""A GPU's memory, clock and kernels: allocator counters, device times, and synchronizations."""

import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_ups._compat.patches import applied


def allocator_counters(device: torch.device) -> dict[str, int]:
    """Return the allocator's counters for ``device``, without synchronizing; empty if it has none."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" and torch.cuda.is_initialized() else {}


def device_memory(device: torch.device) -> int | None:
    """Return the memory of ``device`` in bytes, or None if it is not a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def begin_history(device: torch.device) -> None:
    """Start to record where allocations come from; each then costs some microseconds."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000, device=device)


def end_history(device: torch.device) -> None:
    """Stop recording."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def write_snapshot(path: Path, device: torch.device) -> bool:
    """Write a snapshot of the allocator to ``path``; return whether there was an allocator."""
    if device.type != "cuda":
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


def end_allocations(device: torch.device, pool: Any) -> None:
    """Let ``device`` allocate nothing more from the memory ``pool`` of a capture that failed, if it still does."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)  # pyright: ignore[reportAttributeAccessIssue]


_CALIBRATION = 2_000_000  # clock cycles: about a millisecond
_WAKING_MS = 50.0  # of work, after which an idle device has raised its clock


class CudaClock:
    """Measures times of the host and the device, and can delay the device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_ms: float | None = None

    def wake(self) -> None:
        """Keep the device busy until it runs at full clock, which takes some 50 ms."""
        worked = spin = 0.0
        while worked < _WAKING_MS:  # the first one loads the kernel
            spin = max(self._time_of_spin(), 1e-3)
            worked += spin
        self._cycles_per_ms = _CALIBRATION / spin

    def now(self) -> float:
        """Return the host's time in milliseconds."""
        return time.perf_counter() * 1e3

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        """Record the current end of the device's queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has reached ``mark``."""
        return mark.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the milliseconds from ``start`` to ``end`` on the device; both must have passed."""
        return start.elapsed_time(end)

    def hold(self, ms: float) -> None:
        """Keep the device busy for about ``ms`` milliseconds; work queued afterwards waits."""
        if self._cycles_per_ms is None:
            self.wake()
        assert self._cycles_per_ms is not None
        self._spin(int(ms * self._cycles_per_ms))

    def allocated(self) -> int:
        """Return the number of bytes allocated for tensors on the device."""
        return torch.cuda.memory_allocated(self._device)

    def room(self) -> int:
        """Return the number of bytes that tensors could still use."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def counted(self, run: Callable[[], Any]) -> tuple[int, float] | None:
        """Return the number of kernels that ``run`` launches and their milliseconds; None if it synchronizes.

        Also None if the process is already being profiled.
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
        """Return the peak number of bytes of all tensors."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Return unused memory to the device."""
        torch.cuda.empty_cache()

    def recorded(self) -> int:
        """Return the bytes reserved by CUDA graphs, not counting tensors."""
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
    """Return whether torch's profiler is already running in this process; there is only one."""
    return torch.autograd._profiler_enabled()


class Kernels:
    """Torch's profiler, for device activity only."""

    def __init__(self) -> None:
        with _without_warnings():
            self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Start; the first time in a process takes up to a second."""
        with _without_warnings():
            self._profile.start()

    def mark(self) -> None:
        """Mark a point in the device's work; results are between the first mark and the last."""
        torch.cuda._sleep(1)  # a kernel that nothing else uses

    def stop(self) -> list[Kernel]:
        """Stop, and return the device's kernels, in any order. Synchronizes."""
        with _without_warnings():
            self._profile.stop()
        return between_marks(
            (event.name, event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        )


def _without_warnings() -> AbstractContextManager[Any]:
    return warnings.catch_warnings(action="ignore")  # about events of several cycles; there is only one


def between_marks(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the parts of ``kernels`` between the first and the last mark; all of them without two marks."""
    kernels = list(kernels)
    marks = sorted(start for name, start, _ in kernels if "spin_kernel" in name)
    if len(marks) < 2:
        return kernels
    first, last = marks[0], marks[-1]
    return [(name, max(start, first), min(end, last)) for name, start, end in kernels if start <= last and end >= first]


@contextmanager
def watched_waits(counts: "Counter[str]") -> Iterator[None]:
    """Count, while the context is open, the lines at which the host waits for the device; prints nothing.

    Torch reports these lines (``torch.cuda.set_sync_debug_mode``), except for explicit ``torch.cuda.synchronize``,
    which is intercepted here.
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
    """Return the line that waits: the innermost one of user code, or that of a library if there is none."""
    frames = [frame for frame in traceback.extract_stack(sys._getframe(2)) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.endswith("/warnings.py")]
    if not frames:
        return None
    # The script that called fit is user code, too: the step is below the last frame of Lightning.
    below = max((i for i, frame in enumerate(frames) if _is_lightning(frame.filename)), default=-1) + 1
    own = [frame for frame in frames[below:] if not _is_library(frame.filename)]
    chosen = (own or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno} ({chosen.name})"


def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _OURS))


def _is_lightning(path: str) -> bool:
    return _is_library(path) and (path.startswith(_OURS) or "/lightning/" in path or "/pytorch_lightning/" in path)
