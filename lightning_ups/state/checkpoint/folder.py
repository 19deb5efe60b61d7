"""A checkpoint as a folder: when it is complete, which is the newest, and how one replaces another.

Note [What a kill leaves behind]. A folder is filled in this order: the file ``incomplete``, the data of all ranks, the
rest of the state, the marker ``complete.json``; then ``incomplete`` is deleted. So a folder is complete exactly if it
has a marker and its files have the sizes listed there, whenever the process was killed. A checkpoint whose path is
taken is written next to it, with the suffix ``.saving``. When it is complete, two renames replace the old one: the old
one moves to ``.previous``, the new one to the path. Between the two, the path is empty and both are complete: `located`
finds them, and `settle` restores the path before anybody looks for it. Renames are atomic on all shared file systems;
swapping two folders atomically is not supported by NFS, Lustre and FUSE. A folder to be deleted is first renamed to
``.removing``, so that a partial checkpoint never has the name of a checkpoint.

Note [Two runs in one folder]. The file ``incomplete`` names the process that writes, and is locked by it. A draft is
deleted only if that process has ended. If it ran on another machine, where nobody knows, its draft must not have
changed for two hours. Until then a run that replaces the same checkpoint writes its own draft, ``.saving2``.

Note [What a power loss leaves behind]. A file system may write renames and deletions to the disk in another order than
they were made. Everything that completes or renames a checkpoint, including directory entries, is therefore synced to
the disk before the checkpoint that it replaces is deleted.
"""

import json
import os
import shlex
import shutil
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from lightning_ups.state.checkpoint import meta
from lightning_ups.state.checkpoint.checksums import (
    CHECKSUMS,
    DamagedFileError,
    Record,
    RecordReader,
    checksum,
    checksum_of_file,
    damage,
    from_json,
)
from lightning_ups.state.checkpoint.claims import Signature, is_locked, lock, owner, sign

FORMAT = 2
UNVERIFIED = 1  # the format whose checksums are computed in another way, and not verified
MARKER = "complete.json"
META = "meta.pt"  # same name as in Lightning's ModelParallelStrategy
_STARTED = "incomplete"
ABANDONED_S = 2 * 3600.0  # a checkpoint in progress changes more often: ranks wait for one another for an hour at most
_SAVING, _SECOND_SAVING, _PREVIOUS, _REMOVING = ".saving", ".saving2", ".previous", ".removing"
_WRITING = ".writing"  # suffix of a single file until it is complete and renamed
_SUFFIXES = (_SAVING, _SECOND_SAVING, _PREVIOUS, _REMOVING, _WRITING)
_NAME_IN_ZIP = 30  # offset of the name of the first entry
_TENSORS = ".distcp"
_DEEPEST = 4  # from trainer.default_root_dir: lightning_logs/version_0/checkpoints/last.ckpt


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written into ``folder``; its final path is ``path``."""

    path: Path
    folder: Path
    signature: Signature | None = None  # of the process that writes


class HeldError(FileExistsError):
    """Another run is writing the same checkpoint."""


def unwritable(path: Path) -> str | None:
    """Return why no folder can be created at ``path`` or written to, or None if no reason is known."""
    # Not `Path.exists`, which raises for folders without permission, and misses broken links.
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def begin(path: Path) -> Draft:
    """Prepare a folder for a checkpoint at ``path``, without touching a complete one at that path.

    Raises:
        HeldError: If another run is writing a checkpoint to the same path.
        FileExistsError: If there is a folder with other content.
    """
    make(path.parent)
    _settle(path)
    taken = path.is_symlink() or path.is_file() or is_complete(path) or _may_be_stock(path)
    if not taken and path.exists():
        _check_ours(path)
        if holder(path) is None:
            _delete(path)  # left by a killed run
    drafts = [_beside(path, _SAVING), _beside(path, _SECOND_SAVING)] if taken else [path]
    free = next((draft for draft in drafts if not draft.exists()), None)
    if free is None:
        raise HeldError(
            f"{drafts[0]} is being written by another run: {holder(drafts[0])}. If that run has ended, delete it:"
            f" rm -r {shlex.quote(str(drafts[0]))}"
        )
    free.mkdir()
    return Draft(path, free, sign(free / _STARTED))


def holder(path: Path) -> str | None:
    """Return which other run may still write the unfinished checkpoint at ``path``, or None if none does."""
    if not path.is_dir():
        return "a process with a lock on it" if path.is_file() and is_locked(path) else None
    other = owner(path / _STARTED)
    if other is None or other.is_alive is False:
        return None
    if other.is_alive is None:
        with suppress(OSError):  # it is changing right now
            other = replace(other, unchanged_s=time.time() - _nbytes_and_change(path)[1])
    return str(other) if other.is_alive or other.unchanged_s < ABANDONED_S else None


def finish(draft: Draft, *, files: Mapping[str, bytes], facts: dict[str, Any]) -> None:
    """Complete ``draft``: write ``files``, then the marker, and move the folder to its path."""
    for name, content in files.items():
        _write(draft.folder / name, content)
    mark(draft, facts, sums={name: checksum(content) for name, content in files.items()})
    take_place(draft)


def mark(draft: Draft, facts: dict[str, Any], *, sums: Mapping[str, int]) -> None:
    """Write the marker, with ``facts``, the size of every file, and checksums.

    Args:
        draft: A draft that only lacks the marker.
        facts: Facts about the run.
        sums: Checksums of files. Files of tensors have theirs in the file ``checksums.json``.
    """
    files = {entry.name: entry.stat().st_size for entry in draft.folder.iterdir() if entry.name != _STARTED}
    read = {name for name in files if not name.endswith(_TENSORS)} - sums.keys()  # .metadata, which DCP has written
    sums = {**sums, **{name: checksum_of_file(draft.folder / name) for name in read}}
    _sync(draft.folder)
    marker = {"format": FORMAT, "saved_at_ns": time.time_ns(), **facts, "files": files, "checksums": sums}
    marker["checksum"] = _sum_of(marker)
    _write(draft.folder / MARKER, json.dumps(marker, indent=1).encode())
    (draft.folder / _STARTED).unlink()
    if draft.signature is not None:
        draft.signature.release()
    _sync(draft.folder)


def take_place(draft: Draft) -> None:
    """Move a complete draft to its path; only then delete the checkpoint that it replaces."""
    if draft.folder == draft.path:
        _sync(draft.path.parent)
        return
    previous = _beside(draft.path, _PREVIOUS)
    if previous.exists():
        _delete(previous)
    if draft.path.is_symlink() or draft.path.exists():
        draft.path.rename(previous)
    try:
        draft.folder.rename(draft.path)
    except FileNotFoundError:  # another process has just called `settle`
        if not is_complete(draft.path):
            raise
    _sync(draft.path.parent)
    if previous.is_symlink() or previous.exists():
        _delete(previous)


def write_file(path: Path, content: Any) -> None:
    """Save ``content`` as one file at ``path``. It replaces an existing checkpoint once it is complete.

    Raises:
        FileExistsError: If there is a folder that was never a checkpoint.
    """
    make(path.parent)
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder:
        _check_ours(path)
    writing = _beside(path, _WRITING)
    if held := holder(writing):
        raise HeldError(f"{path} is being written by another run: {held}")
    try:
        with writing.open("wb") as file:
            lock(file.fileno())
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        writing.unlink(missing_ok=True)
        if interruption(error) is not None:
            raise
        raise system_error(error) from error
    if is_folder:  # a file cannot atomically replace a folder
        writing = writing.rename(_beside(path, _SAVING))
        _sync(path.parent)
        _delete(path)
    writing.rename(path)
    _sync(path.parent)


def system_error(error: BaseException) -> BaseException:
    """Return the operating system's error behind ``error``, such as a full disk: torch's writer raises another one."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return error if behind is None else behind


def interruption(error: BaseException | None, *, alone: bool = False) -> BaseException | None:
    """Return what interrupted this process, such as Ctrl-C, if it caused ``error``; DCP wraps it in its own error.

    A process that read or wrote ``alone``, without the other ranks, is rank 0 for DCP.
    """
    if isinstance(error, CheckpointException):
        rank = dist.get_rank() if dist.is_initialized() and not alone else 0
        error, _ = error.failures.get(rank, (None, None))
    return None if isinstance(error, Exception | CheckpointException) else error


def discard(draft: Draft) -> None:
    """Delete a draft that will not be completed; nothing else is touched."""
    if draft.folder.exists():
        _delete(draft.folder)
    if draft.signature is not None:
        draft.signature.release()


def remove(path: Path) -> None:
    """Delete the checkpoint at ``path``: a folder, a file, or a link but not its target. It may already be gone.

    Anything else is kept, with a warning: `ModelCheckpoint` reads the paths that it deletes from a checkpoint.
    """
    if not os.path.lexists(path):
        return
    is_folder = path.is_dir() and not path.is_symlink()
    is_ours = is_folder or path.is_symlink() or path.suffix == ".ckpt" or meta.is_zip(path)
    if (
        ".." in path.parts
        or not is_ours
        or (is_folder and any(path.iterdir()) and not holds_part(path))
        or holder(path)
    ):
        warnings.warn(f"{path} is not deleted: it is not a checkpoint of this run.", stacklevel=2)
    else:
        _delete(path)


def is_complete(path: Path) -> bool:
    """Return whether ``path`` is a complete checkpoint: a folder of ours or of ModelParallelStrategy, or a file."""
    if path.is_file():
        return path.suffix != _SAVING or meta.is_zip(path)  # it is renamed when it is complete
    return fault(path) is None


def fault(path: Path) -> str | None:
    """Return why the folder at ``path`` is not a complete checkpoint, or None if it is."""
    if not path.is_dir() or path.suffix == _REMOVING:
        return "it is no folder" if path.exists() else "it does not exist"
    if not (path / MARKER).exists():
        return None if _is_stock(path) else f"{MARKER} is missing, which is written last"
    if (marker := _marker(path)) is None:
        return f"{MARKER} is damaged"
    for entry in path.iterdir():
        if not (entry.is_file() or entry.is_dir()):
            return f"{entry.name} is not a file"  # but a pipe or a device, which could be read forever
    sizes = ((name, _size(path / name), size) for name, size in marker["files"].items())
    return next((f"{name[:80]} has {found} bytes and not {size}" for name, found, size in sizes if found != size), None)


def located(path: Path) -> Path | None:
    """Return where the complete checkpoint for ``path`` is, or None. After a kill it may be next to the path."""
    if not path.name:
        return path if is_complete(path) else None
    beside = [_beside(path, suffix) for suffix in (_SAVING, _SECOND_SAVING, _PREVIOUS)]
    return next(filter(is_complete, (*beside[:2], path, beside[2])), None)  # newest first


def settle(directory: Path) -> None:
    """Restore the paths of complete checkpoints if a process was killed between two renames.

    Nothing is deleted. Several processes may call it at once; without write permission it does nothing.
    """
    for name in _leftovers(directory):
        path = directory / name
        with suppress(OSError):  # for example, another process has just renamed it
            if not os.path.lexists(path) and (found := located(path)) is not None:
                found.rename(path)


def clean(directory: Path, *, unchanged_s: float) -> dict[str, int]:
    """Delete partially written or deleted checkpoints in ``directory``, and return the bytes of each by name.

    Args:
        directory: A directory of checkpoints.
        unchanged_s: Only what has not changed for this long is deleted, unless its writer is known to have ended. What
            another run may still write stays anyway.
    """
    settle(directory)
    before = {name: _left(directory / name) for name in _leftovers(directory)}
    for path in directory.iterdir():
        if _is_unfinished(path) and path.suffix not in _SUFFIXES:
            before.setdefault(path.name, []).append(path)
    deleted = {}
    for name, left in before.items():
        with suppress(OSError):  # for example, of another user: harmless
            nbytes, changed = zip(*map(_nbytes_and_change, left), strict=True)
            writers = [owner(each / _STARTED) for each in left]
            ended = any(writer is not None and writer.is_alive is False for writer in writers)
            if any(map(holder, left)) or (time.time() - max(changed) < unchanged_s and not ended):
                continue
            _settle(directory / name)
            if _is_unfinished(directory / name):
                _delete(directory / name)
            deleted[name] = sum(nbytes)
    return deleted


def _leftovers(directory: Path) -> set[str]:
    """Return the names of checkpoints next to which a killed process has left something."""
    if not directory.is_dir():
        return set()
    left = (path for path in directory.iterdir() if path.suffix in _SUFFIXES)
    return {p.stem for p in left if p.stem.endswith(".ckpt") or (p.is_dir() and holds_part(p))}


def _left(path: Path) -> list[Path]:
    return [left for suffix in _SUFFIXES if os.path.lexists(left := _beside(path, suffix))]


def _is_unfinished(path: Path) -> bool:
    return (path / _STARTED).is_file() and not is_complete(path)


def _nbytes_and_change(path: Path) -> tuple[int, float]:
    stats = [entry.lstat() for entry in (path, *(path.rglob("*") if path.is_dir() else ()))]
    return sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)


def newest(directory: Path) -> Path | None:
    """Return the complete checkpoint folder in ``directory`` that was saved last, or None."""
    return max(_whole(directory), key=_saved_at, default=None)


def newest_within(path: Path) -> Path | None:
    """Return the complete checkpoint that was saved last in the folder ``path`` or its subfolders, or None."""
    below = chain.from_iterable(path.glob("/".join("*" * depth)) for depth in range(1, _DEEPEST + 1))
    return max(filter(_is_open_and_whole, below), key=_saved_at, default=None)


def _is_open_and_whole(path: Path) -> bool:
    try:
        return (path.suffix == ".ckpt" or path.is_dir()) and is_complete(path)
    except PermissionError:
        return False  # no permission


def newer(one: Path | None, other: Path | None) -> Path | None:
    """Return which of two complete checkpoints was saved later."""
    return max((path for path in (one, other) if path is not None), key=_saved_at, default=None)


def _whole(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (p for p in directory.iterdir() if p.is_dir() and not p.is_symlink() and is_complete(p))


def _settle(path: Path) -> None:
    # A run killed between the marker and the second rename left a complete draft: it takes its place now.
    for saving in (_beside(path, _SAVING), _beside(path, _SECOND_SAVING)):
        if located(path) == saving:
            take_place(Draft(path, saving))
        elif saving.exists() and holder(saving) is None:
            _delete(saving)
    previous = _beside(path, _PREVIOUS)
    if previous.is_symlink() or previous.exists():
        if path.exists() and located(path) == previous:  # the newer one was damaged since
            _delete(path)
        if path.exists():
            _delete(previous)
        else:
            previous.rename(path)
    removing = _beside(path, _REMOVING)
    if removing.exists():
        shutil.rmtree(removing)
    if holder(writing := _beside(path, _WRITING)) is None:
        writing.unlink(missing_ok=True)


def holds_part(path: Path) -> bool:
    """Return whether the folder at ``path`` contains parts of a checkpoint without a marker."""
    names = (entry.name for entry in path.iterdir())
    return any(name in (_STARTED, META, ".metadata") or name.endswith(_TENSORS) for name in names)


def _check_ours(path: Path) -> None:
    names = [entry.name for entry in path.iterdir()]
    if names and not holds_part(path):
        raise FileExistsError(f"{path} is a folder that holds {min(names)} and no checkpoint, and would be replaced")


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    removing = path if path.suffix == _REMOVING else _beside(path, _REMOVING)
    if removing != path:
        if removing.exists():
            shutil.rmtree(removing)
        path.rename(removing)
    shutil.rmtree(removing)


def make(directory: Path) -> None:
    """Create ``directory`` and its parents, synced to the disk."""
    if not directory.is_dir():
        make(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _is_stock(folder: Path) -> bool:
    """Return whether ModelParallelStrategy wrote ``folder``, without a marker; ours may have lost its marker."""
    if not _may_be_stock(folder):
        return False
    # Torch names an archive after the file that it opens, and "archive" if it writes to memory, as this package does.
    # It also uses "archive" for paths that are not ASCII.
    with (folder / META).open("rb") as file:
        return file.read(64).startswith(b"meta/", _NAME_IN_ZIP) or not str(folder.absolute()).isascii()


def _may_be_stock(folder: Path) -> bool:
    """Return whether ``folder`` has the files of ModelParallelStrategy; a tool may have rewritten some of them."""
    return (folder / ".metadata").is_file() and (folder / META).is_file() and not (folder / _STARTED).exists()


def _marker(folder: Path) -> dict[str, Any] | None:
    """Return the content of the marker, or None if it is missing or invalid."""
    try:
        marker = meta.read_json(folder / MARKER)
    except FileNotFoundError:
        return None
    is_ours = isinstance(marker, dict) and isinstance(marker.get("saved_at_ns"), int)
    if not is_ours or not isinstance(marker.get("files"), dict) or not marker["files"]:
        return None
    if not all(meta.is_name_in_folder(name) and type(size) is int for name, size in marker["files"].items()):
        return None
    if "checksums" in marker or "checksum" in marker:  # one of them may be damaged
        own = marker.pop("checksum", None)
        sums = marker.get("checksums")
        if own != _sum_of(marker) or not isinstance(sums, dict) or not sums.keys() <= marker["files"].keys():
            return None
    return marker


def _sum_of(marker: Mapping[str, Any]) -> int:
    return checksum(json.dumps(marker, sort_keys=True).encode())


def check_format(path: Path) -> None:
    """Raise ValueError if the checkpoint folder at ``path`` has an unknown format."""
    found = (_marker(path) or {}).get("format", FORMAT)
    if type(found) is not int or found not in (UNVERIFIED, FORMAT):
        raise ValueError(
            f"{path} is a checkpoint of format {found!r:.40}. This version of lightning_ups reads format {FORMAT} and"
            " earlier ones. A later version wrote it: update lightning_ups, or give another checkpoint."
        )


def has_checksums(path: Path) -> bool:
    """Return whether the checkpoint folder at ``path`` has checksums; older and foreign ones have none."""
    return _summed_marker(path) is not None


def _summed_marker(path: Path) -> dict[str, Any] | None:
    """Return the content of the marker if its checksums can be verified."""
    marker = _marker(path) or {}
    return marker if "checksums" in marker and marker.get("format") != UNVERIFIED else None


def verify(path: Path) -> None:
    """Verify a file of a checkpoint folder, if the folder has checksums.

    Raises:
        DamagedFileError: If it differs from what was written.
    """
    sums = (_marker(path.parent) or {}).get("checksums", {})
    if path.name in sums and checksum_of_file(path) != sums[path.name]:
        raise DamagedFileError(damage(path))


def records(path: Path) -> dict[tuple[str, int], Record] | None:
    """Return the checksums of the tensors in the folder at ``path``, by file and offset, or None if there are none.

    Raises:
        DamagedFileError: If the file of checksums is damaged.
    """
    if (marker := _summed_marker(path)) is None:
        return None
    verify(path / CHECKSUMS)
    try:
        files = meta.read_json(path / CHECKSUMS)
        if not files.keys() <= marker["files"].keys():
            raise ValueError("it names files that are not in this checkpoint")
        found = from_json(files)
        if any(offset + record.length > marker["files"][name] for (name, offset), record in found.items()):
            raise ValueError("it names more bytes than there are")
        return found
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise DamagedFileError(meta.damage(path / CHECKSUMS, error)) from error


def damaged(path: Path) -> list[str]:
    """Return the names of all files of the whole checkpoint at ``path`` that do not hold what was saved.

    Raises:
        ValueError: If nothing can be verified, since there are no checksums.
    """
    if path.is_file():
        if not meta.is_zip(path):
            raise ValueError(f"{path} has no checksums: torch.save writes them since torch 1.6, in a zip archive.")
        try:
            with zipfile.ZipFile(path) as archive:
                # Torch neither compresses nor encrypts, and Python would try to undo it.
                is_plain = not any(entry.compress_type or entry.flag_bits & 1 for entry in archive.infolist())
                return [] if is_plain and archive.testzip() is None else [path.name]
        except (zipfile.BadZipFile, EOFError, ValueError):
            return [path.name]
    if (marker := _summed_marker(path)) is None:
        raise ValueError(
            f"{path} has no checksums that can be verified: an earlier version or another program wrote it."
        )
    found = {name for name, expected in marker["checksums"].items() if checksum_of_file(path / name) != expected}
    if CHECKSUMS not in found:
        for (name, offset), record in (records(path) or {}).items():
            with (path / name).open("rb") as file:
                try:
                    RecordReader(file, offset=offset, record=record, name=name).verify()
                except DamagedFileError:
                    found.add(name)
    return sorted(found)


def _saved_at(path: Path) -> int:
    marker = _marker(path) if path.is_dir() else None
    return marker["saved_at_ns"] if marker else path.stat().st_mtime_ns


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except PermissionError:
        raise
    except (OSError, ValueError):  # a name that is invalid on this system; or another process has renamed the folder
        return None


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _sync(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
