"""What the device does in a few steps, kernel by kernel, and where the host waits for it."""

import sys
import sysconfig
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

__all__ = ["Kernels", "between_marks", "is_profiled", "watched_waits"]

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
