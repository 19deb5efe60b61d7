"""One GPU for several runs of the zoo at a time: they compile side by side, and whoever is timed has the GPU alone.

Compiling takes ten times as long as timing and needs little of the GPU. So a run holds the GPU while it executes and
lets go of it while it compiles, and the runs beside it are stopped by SIGSTOP as long as one holds it. `zoo.py` gives
each run a folder that all runs on that GPU share.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler  # noqa: TID251

__all__ = ["FOLDER", "SharedGpu", "settle"]

FOLDER = "UPS_ZOO_GPU"  # the environment variable that names the folder
_COMPILES = (CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD)


class SharedGpu:
    """This process's share of a GPU.

    Short turns, such as running what was just compiled, wait for one other turn at most; long ones wait in a line.

    Args:
        folder: Shared by all runs on the GPU. None: nobody else is there.
    """

    def __init__(self, folder: Path | None) -> None:
        self.waited_s = 0.0
        self._folder, self._is_long, self._holds, self._inside = folder, False, False, False
        if folder is not None:
            self._turn, self._line = _opened(folder / "turn"), _opened(folder / "line")

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the GPU inside, but while torch compiles."""
        if self._folder is None:
            yield
            return
        callback_handler.register_start_callback(self._compiles)
        callback_handler.register_end_callback(self._has_compiled)
        # Parts of a run decide by the memory that is free, and would find what others have taken.
        torch.cuda.mem_get_info = lambda *_: _free_if_alone()
        self._inside = True
        self._take()
        (self._folder / str(os.getpid())).touch()
        try:
            yield
        finally:
            self._inside = False
            callback_handler.remove_start_callback(self._compiles)
            callback_handler.remove_end_callback(self._has_compiled)
            (self._folder / str(os.getpid())).unlink(missing_ok=True)
            self._release()

    def take_long(self) -> None:
        """Wait in the line, and from now on hold the GPU for as long as nothing is compiled."""
        if self._inside and not self._is_long:
            self._release()
            self._is_long = True
            self._take()

    def _take(self) -> None:
        began = time.monotonic()
        if self._is_long:
            fcntl.flock(self._line, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        _tell_others(self._folder, signal.SIGSTOP)
        self._holds = True
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.waited_s += time.monotonic() - began

    def _release(self) -> None:
        if not self._holds:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._holds = False
        _tell_others(self._folder, signal.SIGCONT)  # before the lock is free, so that none is stopped for good
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        fcntl.flock(self._line, fcntl.LOCK_UN)

    def _compiles(self, args: Any) -> None:
        if args.callback_trigger in _COMPILES:
            self._release()

    def _has_compiled(self, args: Any) -> None:
        if args.callback_trigger in _COMPILES and not self._holds:
            self._take()


def settle(folder: Path) -> None:
    """Let the others on a GPU go on after a run has ended, however it did."""
    with (folder / "turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for path in folder.glob("[0-9]*"):
            if not Path("/proc", path.name).exists():
                path.unlink(missing_ok=True)
        _tell_others(folder, signal.SIGCONT)


def _tell_others(folder: Path | None, number: signal.Signals) -> None:
    assert folder is not None
    for path in folder.glob("[0-9]*"):
        if int(path.name) != os.getpid():
            for process in _with_children(path.name):  # a compiler's, which would take the cores of who is timed
                with suppress(ProcessLookupError):
                    os.kill(int(process), number)


def _with_children(process: str) -> Iterator[str]:
    yield process
    for children in Path("/proc", process).glob("task/*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _with_children(child)


def _opened(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)


def _free_if_alone() -> tuple[int, int]:
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return total - torch.cuda.memory_reserved(), total
