"""Running a script in one process for each GPU, never longer than it may, whatever hangs.

The ranks are started here and not by torchrun: its workers live in sessions of their own, outlive it when it is killed,
and keep the pipe open that its parent reads. What the ranks print goes to a file, so that nobody waits for a full pipe.
All that a run has started ends with it, also when the benchmark itself is told to end by SIGINT, SIGTERM or SIGHUP.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "finished", "free_port", "portable", "result_of", "told_to_end"]

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # so that a script works from any folder, installed or not

QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Interrupted(KeyboardInterrupt):
    """The benchmark was told to end while something ran; ``said`` is what that had printed until then."""

    def __init__(self, said: str) -> None:
        super().__init__("interrupted")
        self.said = said


def finished(
    command: Sequence[str],
    *,
    timeout: float,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> str:
    """Run ``command``, once or as so many ranks, and return all that was printed; all end after ``timeout`` seconds.

    The text is `portable`, and ends with what ended the ranks that could not say so. When one fails, the others are
    given ten seconds, since they wait for it. ``stop`` ends all, for runs in threads that nothing else interrupts.

    Raises:
        Interrupted: If this process is told to end; the ranks have ended then.
    """
    run = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+", errors="replace") as output, told_to_end():
        processes: list[subprocess.Popen[bytes]] = []
        said = ""
        try:
            port = free_port()
            for rank in range(ranks):
                told = {**os.environ, **QUIET, **_rank(rank, ranks, port), **(environment or {}), _RUN: run}
                processes.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=told)
                )
            said = _waited(processes, timeout=timeout, stop=stop)
        except KeyboardInterrupt as error:
            _end(processes, run)  # before what it printed is read
            raise Interrupted(_said(output)) from error
        finally:
            failed = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
            _end(processes, run)
        printed = _said(output)
        for rank, code in failed.items():
            if code < 0 or not printed.strip():  # others say themselves why
                how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
                said += f"\n{f'rank {rank}' if ranks > 1 else 'it'} ended with {how}"
        return printed + said


def _waited(processes: Sequence["subprocess.Popen[bytes]"], *, timeout: float, stop: threading.Event | None) -> str:
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            end = min(end, time.monotonic() + 10)
        if stop is not None and stop.is_set():
            return "\nended since the benchmark was told to end"
        if time.monotonic() > end:
            return f"\nended after {timeout:.0f} s, or since a rank had failed"
        time.sleep(0.1)
    return ""


def _said(output: Any) -> str:
    output.seek(0)
    return portable(output.read())


@contextmanager
def told_to_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what SIGINT does: by themselves they would leave the ranks behind, on the GPU."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    # What somebody else handles, or ignores as nohup does, stays as it is.
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def result_of(text: str) -> dict[str, Any]:
    """Return what a script printed as its RESULT, a line of JSON, or the end of all that it printed as its error.

    A line that was cut off, since the script was ended while it printed it, does not count.
    """
    for line in reversed(text.splitlines()):
        if line.startswith("RESULT "):
            with suppress(json.JSONDecodeError):
                return json.loads(line.removeprefix("RESULT "))
    return {"error": text.strip()[-1500:] or "it ended without a word"}


def portable(text: str) -> str:
    """Return ``text`` without this machine's folders, as raw output keeps it: files by where the project has them."""
    paths = sysconfig.get_paths()
    installed = {path: "site-packages" for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    folders = {
        **{str(path): "." for path in (Path.cwd(), Path(__file__).parent.parent, ROOT)},
        **installed,
        paths["purelib"]: "site-packages",
        paths["platlib"]: "site-packages",
        paths["stdlib"]: "python",
        sys.prefix: "prefix",
        sys.base_prefix: "prefix",
        tempfile.gettempdir(): "tmp",
        str(Path.home()): "~",
    }
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            text = re.sub(rf"(?<![\w./~-]){re.escape(folder)}(?![\w.-])", folders[folder], text)
    return text


def _rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",  # Lightning then takes the ranks as they are and starts none
    }


def free_port() -> int:
    """Return a port of this machine that nobody listens to.

    It lies below the ports that the system gives to connections, which another run could take before this one begins.
    """
    while True:
        port = random.randrange(20_000, 32_000)  # no secret
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


_RUN = "UPS_BENCHMARK_RUN"  # tells by the environment who belongs to a run


def _end(processes: Sequence["subprocess.Popen[bytes]"], run: str) -> None:
    """End all that a run has started: what is in the ranks' sessions, and what has left them, as torchrun's workers.

    All are told at once, so that many ranks that hang take no longer than one.
    """
    leaders = [process.pid for process in processes]
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = _members(leaders, run)
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, number)
        for process in processes:
            if process.pid not in members:  # where there is no /proc; it does nothing to one that has ended
                process.send_signal(number)
        end = time.monotonic() + 5
        while time.monotonic() < end and (any(p.poll() is None for p in processes) or _members(leaders, run)):
            time.sleep(0.05)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # one that a driver holds is not waited for
            process.wait(timeout=5)


def _members(leaders: Sequence[int], run: str) -> list[int]:
    found, mark = [], f"{_RUN}={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended, or be another user's
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(session) in leaders or mark in (folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    print(finished(sys.argv[3:], timeout=float(sys.argv[1]), ranks=int(sys.argv[2])))
