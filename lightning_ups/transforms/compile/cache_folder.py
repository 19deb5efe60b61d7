"""A folder in the user's cache that keeps compiled programs from run to run.

What is in it runs as code, so only the user may write to it. Torch's own folder is in ``/tmp``, which many machines
empty, and it only grows.
"""

import hashlib
import json
import os
import tempfile
import time
from functools import cache
from pathlib import Path

import lightning_ups._compat
from lightning_ups._compat.environment import installed
from lightning_ups._compat.torch.compile import dynamo

LIMIT = 4 * 2**30  # bytes
_ROOM = 64 * 2**20  # bytes that the programs of a model may take
_IN_USE = 3600.0  # seconds for which a program is kept after its last use, since another process may still load it
# Others may be shared by machines, which differ in their processors, and whose locks do not hold.
_LOCAL = frozenset("bcachefs btrfs ext2 ext3 ext4 f2fs overlay ramfs tmpfs xfs zfs".split())  # noqa: SIM905


def user_folder() -> Path:
    """Create and return the folder for programs of the installed versions, which only this user may write to.

    Raises:
        OSError: If it is not on a local file system, others may write to it, or it cannot be created or written to.
    """
    root = _root()
    if (kind := _file_system(root)) not in _LOCAL:
        raise OSError(f"{root} is on a file system of type {kind}, which machines may share")
    root.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    for each in (root, *root.parents):
        _check(each, private=each == root)
    folder = root / _key()
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:  # a disk or a quota may be full
        os.posix_fallocate(file.fileno(), 0, _ROOM)
    return folder


def prune(*, limit: int = LIMIT) -> None:
    """Delete the programs that were used longest ago, of any version, until the rest has at most ``limit`` bytes."""
    units = list[tuple[float, int, list[str]]]()  # files of a directory belong together
    for directory, _, names in os.walk(_root()):
        paths = [os.path.join(directory, name) for name in names]
        stats = [os.lstat(path) for path in paths if os.path.lexists(path)]
        if stats:
            used = max(max(each.st_atime, each.st_mtime) for each in stats)
            units.append((used, sum(each.st_size for each in stats), paths))
    total = sum(size for _, size, _ in units)
    for used, size, paths in sorted(units):
        if total <= limit or used > time.time() - _IN_USE:
            return
        for path in paths:
            Path(path).unlink(missing_ok=True)
        total -= size


def _root() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lightning_ups", "compiled")
    if not folder.is_absolute():
        raise OSError(f"{folder} is no absolute path")
    try:
        return folder.resolve()
    except RuntimeError as error:  # of links in a circle, before Python 3.13
        raise OSError(str(error)) from error


@cache
def _key() -> str:
    """Return a name for the versions on which programs depend, and for the passes and patches of this package."""
    digest = hashlib.sha256(json.dumps([installed("lightning_ups"), dynamo.toolchain()]).encode())
    for path in sorted(Path(lightning_ups._compat.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that ``path`` is on; None if it is unknown."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    kind, deepest = None, -1
    for line in lines:
        place, found = line.split(" ")[1:3]
        place = Path(place.replace(r"\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= deepest:
            kind, deepest = found, len(place.parts)
    return kind


def _check(folder: Path, *, private: bool) -> None:
    facts = folder.stat()
    if facts.st_uid not in ((os.geteuid(),) if private else (os.geteuid(), 0)):
        raise PermissionError(f"{folder} belongs to another user")
    sticky = facts.st_mode & 0o1000  # others cannot rename what is in it
    if facts.st_mode & 0o077 if private else facts.st_mode & 0o022 and not sticky:
        raise PermissionError(
            f"others may {'read' if private else 'write'} {folder}: chmod {700 if private else 755} it"
        )
