"""Records which process writes what: each run leaves a small file in a directory and in each unfinished checkpoint.

The file of a killed run shows the next run that half-written checkpoints belong to nobody. On one machine, process ID
and start time tell whether a process still runs. Elsewhere its lock on the file may tell: the kernel frees it.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from lightning_ups.state.checkpoint import meta

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

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
        locked: Whether it holds a lock on the file.
        names: The names of its checkpoints, before numbers are filled in.
    """

    host: str
    system: str
    pid: int
    began: str
    since: str
    job: str
    restart: int
    locked: bool = False
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, running since {self.since}"


@dataclass(frozen=True)
class Neighbor:
    """Another run that has claimed a directory.

    Args:
        claim: The other process.
        file: Its claim file.
        unchanged_s: How long ago it last renewed that file.
        is_alive: Whether it still runs. None: it ran on another machine, so it is unknown.
    """

    claim: Claim
    file: Path
    unchanged_s: float
    is_alive: bool | None

    def __str__(self) -> str:
        return (
            f"{self.claim}" if self.is_alive else f"{self.claim}, last seen {max(self.unchanged_s, 0) / 60:.0f} min ago"
        )


@dataclass(frozen=True)
class Signature:
    """A file that names this process, and the descriptor that locks it."""

    file: Path
    descriptor: int

    def renew(self) -> None:
        """Show that this process still uses it."""
        os.utime(self.file)

    def remove(self) -> None:
        """Delete the file and free the lock."""
        self.file.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Free the lock of a file that is deleted."""
        os.close(self.descriptor)


def sign(file: Path, *, names: Iterable[str] = ()) -> Signature:
    """Write into ``file`` that this process uses what is next to it, and lock it where the file system has locks."""
    descriptor = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o666)
    own = replace(_own(), locked=lock(descriptor), names=[*names])
    os.write(descriptor, json.dumps(asdict(own)).encode())
    return Signature(file, descriptor)


def claim(directory: Path, *, names: Iterable[str] = ()) -> Signature:
    """Write this process's claim into ``directory``."""
    return sign(directory / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}{_SUFFIX}", names=names)


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Let one process at a time look for neighbors and claim ``directory``, where the file system has locks."""
    descriptor = None
    try:
        if fcntl is not None:
            descriptor = os.open(directory, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def neighbors(directory: Path) -> Iterator[Neighbor]:
    """Yield the other runs that have left a claim in ``directory``."""
    for file in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        if (other := owner(file)) is not None:
            forgotten = other.is_alive is None and other.unchanged_s > _FORGOTTEN_S
            yield replace(other, is_alive=False) if forgotten else other


def owner(file: Path) -> Neighbor | None:
    """Return the other process that wrote ``file`` with `sign`. None: this process wrote it, or it is damaged."""
    own = _own()
    with suppress(OSError, TypeError):  # it is just being deleted, or is damaged
        other = Claim(**meta.read_json(file))
        if not all(type(value) is type(getattr(own, name)) for name, value in vars(other).items()):
            return None
        if (other.system, other.pid, other.began) == (own.system, own.pid, own.began):
            return None
        return Neighbor(other, file, time.time() - file.stat().st_mtime, _is_alive(other, own, file))
    return None


def lock(descriptor: int) -> bool:
    """Lock an open file until this process closes it or dies; return whether that succeeded."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # of another process, or not supported by the file system
        return False
    return True


def is_locked(file: Path) -> bool | None:
    """Return whether a process holds a lock on ``file``, or None if that cannot be known."""
    if fcntl is None:
        return None
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is_alive(other: Claim, own: Claim, file: Path) -> bool | None:
    if other.job and other.job == own.job and other.restart < own.restart:
        return False  # SLURM requeues a job when it has ended
    if own.began and (other.host, other.system) == (own.host, own.system):
        return _began(other.pid) == other.began
    held = is_locked(file) if other.locked else None
    # A lock that is free proves an end on one machine only: some file systems do not show it to other machines.
    boot, own_boot = (each.system.partition(" ")[0] for each in (other, own))
    here = boot == own_boot and bool(boot or other.host == own.host)
    return held if held or here else None


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
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""  # not of a zombie


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
