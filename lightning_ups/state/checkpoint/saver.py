"""Writes checkpoints with DCP, synchronously or in the background, one at a time."""

import errno
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from typing_extensions import override

from lightning_ups.state.checkpoint import folder
from lightning_ups.state.checkpoint.io.lanes import Lanes, on_this_gpu
from lightning_ups.state.checkpoint.io.staging import HostCopies, LocalShard, holds_tensors, plain
from lightning_ups.state.checkpoint.io.writing import Writer
from lightning_ups.transforms.quoted import quoted

Phase = Literal["staging", "writing", "written", "marking", "removing", "done"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """The durations of one save, on this rank.

    Args:
        path: The path of the checkpoint.
        blocked_s: How long training was blocked: by the previous save, and by copying to the host; a synchronous save
            blocks until it is complete.
        staging_s: The part of it spent on copying to the host.
        total_s: From the call until the checkpoint was complete; None before.
    """

    path: Path
    blocked_s: float
    staging_s: float
    total_s: float | None = None


@dataclass
class _InFlight:
    draft: folder.Draft
    thread: threading.Thread | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # set when the thread has ended
    error: BaseException | None = None
    whole: bool | None = None  # None while it is being written
    to_remove: list[Path] = field(default_factory=list)  # once it is complete
    lock: threading.Lock = field(default_factory=threading.Lock)  # for the last two


class Saver:
    """Saves the state of all ranks as a folder, and deletes older ones only when the new one is complete.

    The state is first copied to the host. Then a synchronous save writes it; an asynchronous one writes in a thread,
    with a separate process group, and at most one is in progress. All ranks call every method, in the same order.

    Args:
        asynchronous: Write in the background.
        timeout: How long ranks wait for one another.
        threads: The number of files that each rank writes at once; None: its share of the cores, at most 8.
        observe: Called from the saving thread when a phase of a save begins.
    """

    def __init__(
        self,
        *,
        asynchronous: bool,
        timeout: timedelta = timedelta(minutes=30),
        threads: int | None = None,
        observe: Callable[[Phase, Path], None] | None = None,
    ) -> None:
        self.observe = observe
        self.last: SaveTimes | None = None
        self._asynchronous, self._timeout, self._lanes = asynchronous, timeout, Lanes(threads)
        self._copies = HostCopies()
        self._in_flight: _InFlight | None = None
        self._whole: Path | None = None  # the last checkpoint that this saver has completed
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of checkpoints, on the CPU and separate from training's; None without distribution."""
        if self._group is None and dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        return self._group

    def save(
        self,
        state: dict[str, Any],
        *,
        files: dict[str, bytes],
        path: Path,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Save ``state``, nested tensors, and rank 0's ``files`` at ``path``, with ``facts`` in the marker.

        Raises:
            RuntimeError: If this save failed or, when asynchronous, the previous one.
            KeyboardInterrupt: If this process was interrupted; the save is then either discarded or complete.
        """
        started = time.monotonic()
        self.wait()
        try:
            draft = self._on_first(lambda: folder.begin(path))
        except OSError as error:
            raise RuntimeError(self._failure(_InFlight(folder.Draft(path, path), error=error))) from error
        self._in_flight = in_flight = _InFlight(draft)
        self._observe("staging", path)
        staging = time.monotonic()
        # A synchronous save needs no copy: nothing changes during it, and DCP streams from the device.
        staged = self._copies.copy(state) if self._asynchronous else plain(state)
        staging_s = time.monotonic() - staging

        self.last = SaveTimes(path=path, blocked_s=time.monotonic() - started, staging_s=staging_s)

        def write() -> None:
            self._write(in_flight, staged, files, facts or {})
            elapsed = time.monotonic() - started
            assert self.last is not None
            self.last = replace(self.last, total_s=elapsed, **({} if self._asynchronous else {"blocked_s": elapsed}))

        if self._asynchronous:
            # A daemon: a process that ends must not wait for dead ranks. `close` waits for it.
            in_flight.thread = threading.Thread(
                target=_run, args=(write, in_flight, on_this_gpu()), name="checkpoint", daemon=True
            )
            in_flight.thread.start()
            return
        try:
            write()
        except BaseException:  # interrupted again while it was being discarded
            self._in_flight = None
            raise
        if (interrupt := folder.interruption(in_flight.error)) is not None:
            self._in_flight = None
            interrupt.add_note(self._failure(in_flight))
            raise interrupt
        self.wait()

    def save_file(self, content: Any, path: Path) -> None:
        """Save ``content`` of rank 0 at ``path`` as one file, and return when it is complete.

        Raises:
            RuntimeError: If this save or the previous one failed.
        """
        started = time.monotonic()
        self.wait()
        try:
            self._on_first(lambda: folder.write_file(path, content))
        except (OSError, RuntimeError) as error:
            raise RuntimeError(self._failure(_InFlight(folder.Draft(path, path), error=error))) from error
        elapsed = time.monotonic() - started
        self.last = SaveTimes(path=path, blocked_s=elapsed, staging_s=0.0, total_s=elapsed)

    def remove(self, path: Path) -> None:
        """Delete the checkpoint at ``path``, as soon as the save in progress is complete."""
        if _rank() != 0:
            return
        if self._in_flight is not None:
            with self._in_flight.lock:
                if self._in_flight.whole is None:
                    self._in_flight.to_remove.append(path)
                if not self._in_flight.whole:
                    return  # a failed save replaces nothing: the next call of `save` raises
        self._observe("removing", path)
        folder.remove(path)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save in progress has ended, and return whether it has.

        Raises:
            RuntimeError: If it failed.
        """
        in_flight = self._in_flight
        if in_flight is None:
            return True
        thread = in_flight.thread
        # Not with `join`: after an interrupted `join` Python may assume that a running thread has ended
        # (python/cpython#90882), and the next save would overwrite the copies that this one is written from.
        if thread is not None and thread.ident is not None and not in_flight.ended.wait(timeout_s):
            return False
        self._in_flight = None
        if in_flight.error is not None:
            raise RuntimeError(self._failure(in_flight)) from in_flight.error
        return True

    def abandon(self, *, timeout_s: float) -> str | None:
        """Give the save in progress some time to end after training has failed; return its error, if any."""
        in_flight = self._in_flight
        try:
            if self.wait(timeout_s) or in_flight is None:
                return None
        except RuntimeError as error:
            return str(error)
        self._in_flight = self._group = None  # the thread still uses them, and the copies
        self._copies = HostCopies()
        return (
            f"The checkpoint {in_flight.draft.path} was still being written {timeout_s:.0f} s after training failed."
            " Another rank may be dead, and it needs all of them."
            f" Resume from {self._newest(in_flight.draft.path)}."
        )

    def close(self) -> None:
        """Wait for the save in progress, and free memory and the process group.

        Raises:
            RuntimeError: If that save failed.
        """
        try:
            self.wait()
        finally:
            self._copies.close()
            self._lanes.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _write(
        self, in_flight: _InFlight, staged: dict[str, Any], files: dict[str, bytes], facts: dict[str, Any]
    ) -> None:
        draft = in_flight.draft
        try:
            self._observe("writing", draft.path)
            written = _write_data(staged, draft.folder, group=self._group, lanes=self._lanes)
            self._observe("written", draft.path)
            self._on_first(lambda: self._complete(in_flight, {**files, **written}, facts))
            self._whole = draft.path
            self._observe("done", draft.path)
        except BaseException as error:  # noqa: BLE001  (kept for the next call, which raises it)
            in_flight.error = error
            in_flight.whole = bool(in_flight.whole)
            if _rank() == 0 and not in_flight.whole:
                folder.discard(draft)  # a full disk needs the space; complete checkpoints stay

    def _complete(self, in_flight: _InFlight, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        path = in_flight.draft.path
        self._observe("marking", path)
        folder.finish(in_flight.draft, files=files, facts={"world_size": _world_size(), **facts})
        with in_flight.lock:
            in_flight.whole = True
        if in_flight.to_remove:
            self._observe("removing", path)
        while in_flight.to_remove:
            folder.remove(in_flight.to_remove[0])
            in_flight.to_remove.pop(0)

    def _on_first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0, and return its result on every rank, or raise its error."""
        outcome: list[Any] = [None, None]
        if _rank() == 0:
            try:
                outcome[0] = function()
            except OSError as error:
                outcome[1] = error
            except Exception as error:  # noqa: BLE001  (raised below, on every rank, or the others would wait)
                outcome[1] = RuntimeError(quoted(error, whole=True))
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _failure(self, in_flight: _InFlight) -> str:
        path, error = in_flight.draft.path, in_flight.error
        if in_flight.whole and in_flight.to_remove:
            return (
                f"The checkpoint {path} is saved, but {in_flight.to_remove[0]} could not be deleted: {_cause(error)}."
                " Checkpoints that nobody deletes fill the disk."
                " Remove the cause, which stands above."
            )
        if in_flight.whole:
            return (
                f"The checkpoint {path} is whole, but what followed its save failed: {_cause(error)}."
                " Another rank may be dead, and each save needs all of them."
                f" Remove the cause, which stands above, and resume with ckpt_path={str(path)!r}."
            )
        last = self._newest(path)
        full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        kept = f"The newest whole checkpoint is {last}." if last else "There is no whole checkpoint."
        cure = "Free space on that disk" if full else "Remove the cause, which stands above"
        if isinstance(error, folder.HeldError):
            cure = f"Give each run its own folder in place of {path.parent}"
        elif getattr(error, "errno", None) == errno.EEXIST or "No such file or directory" in str(error):
            cure = f"Another run seems to write to {path.parent}: give each run its own folder"
        cure = "Let the next one end" if folder.interruption(error) is not None else cure
        resume = f", and resume with ckpt_path={str(last)!r}." if last else ", and start again."
        return f"The checkpoint {path} could not be saved: {_cause(error)}. {kept} {cure}{resume}"

    def _newest(self, path: Path) -> Path | None:
        # Next to it, or where another callback of this run keeps its checkpoints.
        beside, own = folder.newest(path.parent), self._whole
        if own is not None and folder.is_complete(own):
            return folder.newer(beside, own)
        return beside

    def _observe(self, phase: Phase, path: Path) -> None:
        if self.observe is not None:
            self.observe(phase, path)


def _run(write: Callable[[], None], in_flight: _InFlight, on_gpu: Callable[[], AbstractContextManager[Any]]) -> None:
    try:
        with on_gpu():
            write()
    except BaseException as error:  # noqa: BLE001  (kept for the next call, which raises it)
        in_flight.error = in_flight.error or error
    finally:
        in_flight.ended.set()


def _write_data(
    state: dict[str, Any], path: Path, *, group: dist.ProcessGroup | None, lanes: Lanes
) -> dict[str, bytes]:
    """Write the data of all ranks, and return, on rank 0, the files that describe it."""
    writer = Writer(path, lanes=lanes)
    if group is not None:
        dcp.save(state, storage_writer=writer, planner=_Planner(), process_group=group)
        return writer.files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=writer, planner=_Planner(), no_dist=True)
    return writer.files


class _Planner(DefaultSavePlanner):
    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        # DCP splits a list of tensors but not a tuple, and would pickle a tuple of the shards' placeholders.
        parts = {".".join(map(str, path)): (path, value) for path, value in _parts((), state_dict)}
        super().set_up_planner({name: value for name, (_, value) in parts.items()}, storage_meta, is_coordinator)
        self.mappings = {name: path for name, (path, _) in parts.items()}

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.local if isinstance(value, LocalShard) else super().lookup_object(index)


def _parts(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _parts((*path, str(key)), inner)
    elif holds_tensors(value):
        for index, inner in enumerate(value):
            yield from _parts((*path, index), inner)
    else:
        yield path, value


def _cause(error: BaseException | None) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1] if "Traceback" in text else text.splitlines()[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
