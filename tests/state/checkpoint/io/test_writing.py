import os
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_ups.state.checkpoint.io.lanes import Lane, Lanes
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into
from lightning_ups.state.checkpoint.io.writing import Writer
from lightning_ups.state.checkpoint.saver import Saver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(*, device="cpu"):
    whole = torch.randn(40, 30, device=device)
    return {
        "weight": whole,
        "part": whole[3:9],
        "transposed": whole.T,
        "columns": whole[:, 2:5],
        "expanded": whole[:1].expand(5, 30),
        "conjugate": torch.randn(3, dtype=torch.complex64, device=device).conj(),
        "scalar": torch.tensor(3.0, device=device),
        "empty": torch.empty(0, 3, device=device),
        "bf16": torch.randn(3, 5, device=device).bfloat16(),
        "float8": torch.randn(8, device=device).to(torch.float8_e5m2),
        "flags": torch.tensor([True, False, True], device=device),
        "int": 3,
        "text": ["a", {"b": None}],
    }


def write(content, path, threads=3):
    dcp.save(content, storage_writer=Writer(path, lanes=Lanes(threads)), no_dist=True)


def read_by_torch(content, path):
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items()} | {"int": 0}
    dcp.load(targets, storage_reader=FileSystemReader(path), no_dist=True)
    return targets


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=1))])
@pytest.mark.parametrize("threads", [1, 3])
def test_torchs_own_reader_reads_it(tmp_path, threads, device):
    content = state(device=device)
    write(content, tmp_path, threads)
    found = read_by_torch(content, tmp_path)
    assert found.pop("int") == 3
    for name, value in found.items():
        assert torch.equal(value.float() if value.dtype.itemsize == 1 else value, whole(content[name])), name
    assert len([*tmp_path.glob("*.distcp")]) == threads


def whole(value):
    value = value.cpu()
    return value.float() if value.dtype.itemsize == 1 else value


def test_by_buffers_as_from_and_to_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    monkeypatch.setattr(Lane.__init__, "__kwdefaults__", {"piece": 64})
    everything = state()
    content = {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}
    write(everything, tmp_path)
    targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in content.items()}
    read_into(targets, FolderReader(tmp_path, threads=3))
    for found in (targets, read_by_torch(content, tmp_path)):
        assert all(torch.equal(whole(found[name]), whole(content[name])) for name in content)


def test_a_file_holds_nothing_else_than_its_entries(tmp_path):
    write(state(), tmp_path)
    entries = FileSystemReader(tmp_path).read_metadata().storage_data.values()
    for file in tmp_path.glob("*.distcp"):
        own = sorted((e.offset, e.length) for e in entries if e.relative_path == file.name)
        assert own[0][0] == 0
        assert [a + b for a, b in own] == [offset for offset, _ in own[1:]] + [file.stat().st_size]


class Watched:
    def __init__(self, stream, seen):
        self.stream, self.seen = stream, seen

    def write(self, data):
        if len(data) > 10_000:
            self.seen.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())
        return self.stream.write(data)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_lies_on_the_host_goes_to_the_file_without_another_copy(tmp_path, monkeypatch, asynchronous):
    stock, seen = FileSystem.create_stream, []

    @contextmanager
    def create(self, path, mode):
        with stock(self, path, mode) as stream:
            yield Watched(stream, seen)

    monkeypatch.setattr(FileSystem, "create_stream", create)
    content = {f"w{n}": torch.randn(100_000) for n in range(5)}
    saver = Saver(asynchronous=asynchronous)
    saver.save(content, files={}, path=tmp_path / "a")
    saver.wait()
    if asynchronous:
        start, length = saver._copies._memory.data_ptr(), saver._copies._memory.nbytes
        assert all(start <= address < start + length for address in seen), "from the copy that was staged"
    else:
        assert sorted(seen) == sorted(value.data_ptr() for value in content.values()), "from where it lies"
    assert len(seen) == 5, "each in one piece"
    saver.close()


def test_files_are_written_at_once(tmp_path, monkeypatch):
    stock, barrier = FileSystem.create_stream, threading.Barrier(3, timeout=60)

    @contextmanager
    def create(self, path, mode):
        if str(path).endswith(".distcp"):
            barrier.wait()
        with stock(self, path, mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", create)
    write({f"w{n}": torch.ones(3) for n in range(5)}, tmp_path)


def test_every_file_is_forced_to_the_disk(tmp_path, monkeypatch):
    stock, forced = os.fsync, set()

    def fsync(descriptor):
        forced.add(os.stat(descriptor).st_ino)
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write({f"w{n}": torch.ones(3) for n in range(5)}, tmp_path)
    assert {file.stat().st_ino for file in tmp_path.iterdir()} <= forced
