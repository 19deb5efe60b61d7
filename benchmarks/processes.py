"""Running a script in one process for each GPU, never longer than it may, whatever hangs.

The ranks are started here and not by torchrun: its workers live in sessions of their own, outlive it when it is killed,
and keep the pipe open that its parent reads. What the ranks print goes to a file, so that nobody waits for a full pipe.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["finished", "portable", "result_of"]

QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}


def finished(
    command: Sequence[str], *, timeout: float, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> str:
    """Run ``command``, once or as so many ranks, and return all that was printed; all end after ``timeout`` seconds.

    The text is `portable`. When a rank fails, the others are given ten seconds, since they wait for it.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes = [
            subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **QUIET, **_rank(rank, ranks), **(environment or {})},
            )
            for rank in range(ranks)
        ]
        end = time.monotonic() + timeout
        said = ""
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, 0) for process in processes):
                    end = min(end, time.monotonic() + 10)
                if time.monotonic() > end:
                    said = f"\nended after {timeout:.0f} s, or since a rank had failed"
                    break
                time.sleep(0.1)
        finally:  # also when this process is interrupted, which the ranks in their sessions do not hear of
            for process in processes:
                _end(process)
        output.seek(0)
        return portable(output.read()) + said


def result_of(text: str) -> dict[str, Any]:
    """Return what a script printed as its RESULT, a line of JSON, or the end of all that it printed as its error."""
    found = [line.removeprefix("RESULT ") for line in text.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1]) if found else {"error": text.strip()[-1500:]}


def portable(text: str) -> str:
    """Return ``text`` without this machine's folders, as raw output keeps it: files by where the project has them."""
    paths = sysconfig.get_paths()
    folders = {
        str(Path(__file__).parent.parent): ".",
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


def _rank(rank: int, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port() if rank == 0 else _PORTS[-1]),
        "TORCHELASTIC_RUN_ID": "benchmark",  # Lightning then takes the ranks as they are and starts none
    }


_PORTS: list[int] = []


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _PORTS.append(free.getsockname()[1])
    return _PORTS[-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    # The whole session: loaders' workers, and what a shell script has started, in groups of their own by `timeout` too.
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in _session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, number)
        process.send_signal(number)  # where there is no /proc; it does nothing to one that has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        end = time.monotonic() + 5
        while _session(process.pid) and time.monotonic() < end:
            time.sleep(0.05)
    process.wait()


def _session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    print(finished(sys.argv[3:], timeout=float(sys.argv[1]), ranks=int(sys.argv[2])))
