"""Child processes of a command that end with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that was started with ``start_new_session=True``, with its workers and ranks, and wait for it."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit for the first SIGTERM or SIGHUP while the context is open, so that `finally` blocks run."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [each for name in names if signal.getsignal(each := signal.Signals[name]) is not signal.SIG_IGN]

    def leave(number: int, _: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
