import errno
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_ups.state.checkpoint import claims, folder, is_complete, newest
from lightning_ups.state.checkpoint import saver as saver_module
from lightning_ups.state.checkpoint.io import lanes
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into
from lightning_ups.state.checkpoint.saver import Saver
from tests.state.checkpoint.io.test_lanes import Cuda, interrupts


def read(path):
    targets = {"m.w": torch.zeros(3)}
    read_into(targets, FolderReader(path))
    return targets["m.w"].tolist()


def save(saver, path, value=1.0):
    weight = torch.full((3,), value)
    others = {f"other{n}": torch.ones(3) for n in range(4)}
    saver.save({"m": {"w": weight} | others}, files={"meta.pt": b"meta"}, path=path, facts={"global_step": 3})
    weight.zero_()


class Gate:
    """Holds the saving thread at a phase until it is opened."""

    def __init__(self, phase):
        self.phase, self.reached, self.opened, self.seen = phase, threading.Event(), threading.Event(), []

    def __call__(self, phase, path):
        self.seen.append(phase)
        if phase == self.phase:
            self.reached.set()
            assert self.opened.wait(20)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves(tmp_path, asynchronous):
    saver = Saver(asynchronous=asynchronous)
    save(saver, tmp_path / "a")
    assert saver.wait()
    assert read(tmp_path / "a") == [1, 1, 1] if asynchronous else True
    assert is_complete(tmp_path / "a")
    assert (tmp_path / "a" / "meta.pt").read_bytes() == b"meta"
    assert saver.last.total_s >= saver.last.blocked_s > 0
    saver.close()


def test_training_goes_on_while_it_writes(tmp_path):
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a")
    assert gate.reached.wait(10)
    assert not is_complete(tmp_path / "a")
    assert saver.wait(timeout_s=0.01) is False
    gate.opened.set()
    saver.wait()
    assert gate.seen == ["staging", "writing", "written", "marking", "done"]
    assert is_complete(tmp_path / "a")


def test_at_most_one_is_under_way(tmp_path):
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a")
    threading.Timer(0.3, gate.opened.set).start()
    save(saver, tmp_path / "b", 2.0)
    assert is_complete(tmp_path / "a")
    assert saver.last.blocked_s > 0.2
    saver.close()
    assert read(tmp_path / "b") == [2, 2, 2]


def test_an_older_one_goes_only_when_the_new_one_is_whole(tmp_path):
    gate = Gate("marking")
    saver = Saver(asynchronous=True, observe=gate)
    gate.opened.set()
    save(saver, tmp_path / "a")
    saver.wait()
    gate.opened.clear()
    save(saver, tmp_path / "b")
    saver.remove(tmp_path / "a")
    gate.reached.wait(10)
    assert is_complete(tmp_path / "a")
    gate.opened.set()
    saver.wait()
    assert not (tmp_path / "a").exists()
    assert is_complete(tmp_path / "b")


def test_one_that_is_being_written_is_not_deleted_under_its_writer(tmp_path):
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a")
    gate.reached.wait(10)
    saver.remove(tmp_path / "a")
    assert (tmp_path / "a").exists()
    gate.opened.set()
    saver.close()
    assert not (tmp_path / "a").exists()


def test_what_is_removed_after_the_writer_ended_goes_at_once(tmp_path):
    saver = Saver(asynchronous=True)
    save(saver, tmp_path / "a")
    saver.wait()
    save(saver, tmp_path / "b")
    while saver._in_flight.thread.is_alive():
        time.sleep(0.01)
    saver.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    saver.close()


def replace(saver, old, *, by):
    save(saver, by)
    saver.remove(old)
    save(saver, by.with_name("c"))  # an asynchronous save tells of the one before


class FullDisk:
    def __init__(self, stream):
        self.stream = stream

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name):
        return getattr(self.stream, name)


def fill_disk(patch, *, after):
    """Let the disk be full after some files."""
    stock, files = FileSystem.create_stream, []

    @contextmanager
    def create(self, path, mode):
        with stock(self, path, mode) as stream:
            if "w" in mode:
                files.append(path)
            yield FullDisk(stream) if len(files) > after else stream

    patch.setattr(FileSystem, "create_stream", create)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_keeps_the_last_one_and_says_so(tmp_path, asynchronous, threads, monkeypatch):
    saver = Saver(asynchronous=asynchronous, threads=threads)
    save(saver, tmp_path / "a")
    saver.wait()
    with monkeypatch.context() as patch:
        fill_disk(patch, after=threads - 1)
        with pytest.raises(RuntimeError, match=r"/b could not be saved: .*No space left.*Free space.*/a'\.$"):
            replace(saver, tmp_path / "a", by=tmp_path / "b")
    assert newest(tmp_path) == tmp_path / "a"
    assert not (tmp_path / "b").exists(), "a full disk needs the room"
    save(saver, tmp_path / "d")
    saver.close()
    assert newest(tmp_path) == tmp_path / "d"


def test_another_run_in_the_same_folder_is_named_as_the_cause(tmp_path):
    def save_by_another_run(phase, path):
        if phase == "marking":
            folder.finish(folder.begin(path), files={"meta.pt": b""}, facts={})

    saver = Saver(asynchronous=False, observe=save_by_another_run)
    with pytest.raises(RuntimeError, match=f"Another run seems to write to {tmp_path}: give each run its own folder"):
        save(saver, tmp_path / "a")
    saver.close()


def writer_of_a_save(path):
    seen = []
    saver = Saver(
        asynchronous=True,
        observe=lambda phase, at: seen.append(claims.owner(at / "incomplete")) if phase == "staging" else None,
    )
    save(saver, path / "a")
    saver.close()
    found = [None, None]
    dist.all_gather_object(found, (os.getpid(), [other and (other.claim.pid, other.is_alive) for other in seen]))
    return found


def test_ranks_of_one_run_write_under_the_name_of_rank_0(ranks, tmp_path):
    (first, of_first), (_, of_second) = ranks(writer_of_a_save, tmp_path)
    assert of_first == [None], "it is the writer"
    assert of_second == [(first, True)]
    assert is_complete(tmp_path / "a")


def test_a_full_disk_at_the_end_surfaces_at_the_end(tmp_path, monkeypatch):
    saver = Saver(asynchronous=True)
    fill_disk(monkeypatch, after=0)
    save(saver, tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"There is no whole checkpoint\. .*start again\.$"):
        saver.close()
    saver.close()


def test_what_cannot_be_deleted_is_not_a_failed_save(tmp_path, monkeypatch):
    saver = Saver(asynchronous=False)
    save(saver, tmp_path / "a")
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "b")
    saver.remove(tmp_path / "a")
    monkeypatch.setattr(saver_module.folder, "remove", lambda path: (_ for _ in ()).throw(PermissionError("no")))
    gate.opened.set()
    with pytest.raises(RuntimeError, match=r"b is saved, but .*/a could not be deleted: no\. .*fill the disk"):
        saver.close()
    assert is_complete(tmp_path / "b")


def test_what_fails_after_a_save_is_told_as_what_it_is(tmp_path):
    def reset(phase, path):
        if phase == "done":
            raise ConnectionResetError("Connection reset by peer")

    saver = Saver(asynchronous=True, observe=reset)
    save(saver, tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"a is whole, .*: Connection reset by peer\. .*ckpt_path='.*/a'\.$") as told:
        saver.close()
    assert "delete" not in str(told.value)


def test_abandoning_gives_it_time_and_tells(tmp_path):
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a")
    gate.reached.wait(10)
    assert "was still being written" in saver.abandon(timeout_s=0.01)
    gate.opened.set()
    assert saver.abandon(timeout_s=1) is None


def test_what_follows_one_that_was_abandoned_is_copied_elsewhere(tmp_path):
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a", 1.0)
    gate.reached.wait(10)
    abandoned = saver._in_flight
    saver.abandon(timeout_s=0.01)
    saver.observe = None
    save(saver, tmp_path / "b", 2.0)
    saver.close()
    gate.opened.set()
    assert abandoned.ended.wait(60)
    assert read(tmp_path / "a") == [1, 1, 1]
    assert read(tmp_path / "b") == [2, 2, 2]


def by_slow_buffers(patch, *, piece=2**12, pause_s=0.02):
    """Let tensors pass through the buffers of lanes, as those of a GPU do, to a disk that is slow in other threads."""
    content = lanes._Buffer.content

    def slow(self):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(pause_s)
        return content(self)

    patch.setattr(lanes.Lane, "_direct", lambda self, row: False)
    patch.setattr(lanes.Lane.__init__, "__kwdefaults__", {"piece": piece})
    patch.setattr(lanes._Buffer, "content", slow)


@pytest.mark.parametrize("name", ["one", "two"])
def test_after_an_interrupt_the_next_one_is_whole_and_right(tmp_path, monkeypatch, name):
    by_slow_buffers(monkeypatch)
    saver = Saver(asynchronous=False, threads=2)
    size, written = 2**15, lanes._Buffer.content

    def state(value):
        return {"m": {name: torch.full((size,), value) for name in ("a", "b")}}

    def interrupted(self):
        if threading.current_thread() is not threading.main_thread() and not times:
            times.append(1)
            time.sleep(0.1)  # the main thread has written its part
            interrupt()
        return written(self)

    times = []
    with interrupts() as interrupt:
        with monkeypatch.context() as patch:
            patch.setattr(lanes._Buffer, "content", interrupted)
            with pytest.raises(KeyboardInterrupt) as found:
                saver.save(state(1.0), files={}, path=tmp_path / "one")
        assert found.value.__notes__ == [
            f"The checkpoint {tmp_path / 'one'} could not be saved: KeyboardInterrupt."
            " There is no whole checkpoint. Let the next one end, and start again."
        ]
        assert not is_complete(tmp_path / "one")
        saver.save(state(2.0), files={}, path=tmp_path / name)
    targets = {f"m.{part}": torch.zeros(size) for part in ("a", "b")}
    read_into(targets, FolderReader(tmp_path / name))
    assert all((value == 2).all() for value in targets.values())
    saver.close()


def test_interrupted_again_while_it_is_discarded_the_next_one_is_saved_all_the_same(tmp_path, monkeypatch):
    saver = Saver(asynchronous=False)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "_write_data", interrupted)
        patch.setattr(saver_module.folder, "discard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(saver, tmp_path / "a")
    assert not is_complete(tmp_path / "a")
    save(saver, tmp_path / "a", 2.0)
    assert read(tmp_path / "a") == [2, 2, 2]


def test_interrupted_as_it_waits_for_the_one_before_the_next_one_still_waits(tmp_path):
    """Both are copied to the same memory; and Python takes the thread for dead."""
    gate = Gate("writing")
    saver = Saver(asynchronous=True, observe=gate)
    save(saver, tmp_path / "a", 1.0)
    gate.reached.wait(10)
    with interrupts() as interrupt:
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            save(saver, tmp_path / "b", 2.0)
    assert not saver.wait(timeout_s=0.01)
    threading.Timer(0.3, gate.opened.set).start()
    save(saver, tmp_path / "c", 3.0)
    saver.close()
    assert read(tmp_path / "a") == [1, 1, 1]
    assert read(tmp_path / "c") == [3, 3, 3]


def test_an_error_of_the_thread_is_told_whatever_it_was(tmp_path, monkeypatch):
    saver = Saver(asynchronous=True)
    monkeypatch.setattr(Saver, "_write", lambda *_: (_ for _ in ()).throw(ValueError("odd")))
    save(saver, tmp_path / "a")
    with pytest.raises(RuntimeError, match="could not be saved: odd"):
        saver.wait()


def test_the_thread_is_on_the_gpu_of_its_caller(tmp_path, monkeypatch):
    cuda, seen = Cuda(monkeypatch), []
    saver = Saver(asynchronous=True, observe=lambda phase, path: seen.append((phase, cuda.current)))
    with cuda.device(3):
        save(saver, tmp_path / "a")
        saver.wait()
    assert dict(seen)["writing"] == 3
    saver.close()


def test_the_last_whole_one_may_lie_in_another_folder(tmp_path):
    saver = Saver(asynchronous=False)
    save(saver, tmp_path / "rolling" / "a")
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, after=0)
        with pytest.raises(RuntimeError, match=r"The newest whole checkpoint is .*rolling/a\. Free space"):
            save(saver, tmp_path / "last" / "b")


@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "one file"])
def test_a_disk_that_is_really_full(tmp_path, whole):
    """Torch's writer hides the system's error behind one of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        saver = Saver(asynchronous=False)
        save(saver, disk / "a")
        state = {"m": {"w": torch.ones(1_000_000)}}
        again = partial(saver.save_file, state) if whole else partial(saver.save, state, files={})
        with pytest.raises(RuntimeError, match=r"b could not be saved: .*No space left on device.*Free space"):
            again(path=disk / "b")
        assert newest(disk) == disk / "a"
        assert [entry.name for entry in disk.iterdir()] == ["a"], "the room is free again"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def unwritable(path):
    saver = Saver(asynchronous=False)
    try:
        saver.save_file({"x": lambda: 0}, path / "a")
    except RuntimeError as error:
        seen = str(error)
    saver.close()
    messages = [None, None]
    dist.all_gather_object(messages, seen)
    return messages


def test_every_rank_learns_what_the_first_cannot_write(ranks, tmp_path):
    messages = ranks(unwritable, tmp_path)
    assert all("a could not be saved" in message and "pickle" in message for message in messages)


def one_rank_fails(path):
    saver = Saver(asynchronous=True)
    save(saver, path / "a")
    saver.wait()
    if dist.get_rank() == 1:
        patch = pytest.MonkeyPatch()
        fill_disk(patch, after=0)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        weight = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        saver.save({"m": {"w": weight}}, files={}, path=path / "b")
        try:
            saver.close()
        except RuntimeError as error:
            seen = str(error)
        else:
            seen = ""
    finally:
        if dist.get_rank() == 1:
            patch.undo()
    messages = [None, None]
    dist.all_gather_object(messages, seen)
    return messages


def test_every_rank_learns_that_one_failed(ranks, tmp_path):
    messages = ranks(one_rank_fails, tmp_path)
    assert all("b could not be saved" in message and "No space left" in message for message in messages)
    assert newest(tmp_path) == tmp_path / "a"
    assert FileSystemReader(tmp_path / "a").read_metadata() is not None
