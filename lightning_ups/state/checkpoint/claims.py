"""Records which runs save into a directory: each run leaves a small file there until it ends.

The file of a killed run shows the next run that half-written checkpoints belong to nobody.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from lightning_ups.state.checkpoint import meta

_PREFIX, _SUFFIX = ".run-", ".json"
_FORGOTTEN_S = 24 * 3600.0  # a run on another machine that has not saved for this long is ignored


@dataclass(frozen=True)
class Claim:
    """A process that saves checkpoints.

    Args:
        host: Its machine.
        system: The boot of that machine and the container in which the process ID is valid.
        pid: Its process ID.
        began: Its start time as counted by the kernel, since process IDs are reused.
        since: The start time as text.
        job: The SLURM job.
        restart: How often SLURM had requeued the job.
    """

    host: str
    system: str
    pid: int
    began: str
    since: str
    job: str
    restart: int

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, running since {self.since}"


@dataclass(frozen=True)
class Neighbor:
    """Another run that has claimed a directory.

    Args:
        claim: The other process.
        file: Its claim file.
        is_alive: Whether it still runs. None: it ran on another machine, so it is unknown.
    """

    claim: Claim
    file: Path
    is_alive: bool | None


def claim(directory: Path) -> Path:
    """Write this process's claim into ``directory``, or renew it, and return its path."""
    own = _own()
    path = directory / f"{_PREFIX}{own.host}-{own.pid}{_SUFFIX}"
    path.write_text(json.dumps(asdict(own)))
    return path


def neighbors(directory: Path) -> Iterator[Neighbor]:
    """Yield the other runs that have left a claim in ``directory``."""
    own = _own()
    for file in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        with suppress(OSError, TypeError):  # it is just ending, or the file is damaged
            other = Claim(**meta.read_json(file))
            if not all(type(value) is type(getattr(own, name)) for name, value in vars(other).items()):
                continue
            if (other.system, other.pid, other.began) == (own.system, own.pid, own.began):
                continue
            alive = _is_alive(other, own)
            if alive is None and time.time() - file.stat().st_mtime > _FORGOTTEN_S:
                alive = False
            yield Neighbor(other, file, alive)


def _is_alive(other: Claim, own: Claim) -> bool | None:
    if other.job and other.job == own.job and other.restart < own.restart:
        return False  # SLURM requeues a job when it has ended
    if (other.host, other.system) != (own.host, own.system):
        return None
    return _began(other.pid) == other.began


def _own() -> Claim:
    pid = os.getpid()
    return Claim(
        host=socket.gethostname(),
        system=f"{_read('/proc/sys/kernel/random/boot_id')} {_link('/proc/self/ns/pid')}",
        pid=pid,
        began=_began(pid),
        since=datetime.now().isoformat(" ", "seconds"),
        job=os.environ.get("SLURM_JOB_ID", ""),
        restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    )


def _began(pid: int) -> str:
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[19] if stat else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
