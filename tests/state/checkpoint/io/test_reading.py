import io
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.utils import _ReaderView
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from lightning_ups.state.checkpoint.checksums import RecordReader
from lightning_ups.state.checkpoint.io import reading
from lightning_ups.state.checkpoint.io.lanes import Lane
from lightning_ups.state.checkpoint.io.reading import FolderReader, SlicedReader, fill, mapped_safetensors, read_into

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/tmp/lightning_ups_was_here",)


def write(path, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def test_reads_what_dcp_wrote(tmp_path):
    write(tmp_path, {"w": torch.arange(4.0).bfloat16(), "lr": 0.1, "names": ["a"]})
    targets = {"w": torch.zeros(4, dtype=torch.bfloat16), "lr": None, "names": None}
    read_into(targets, FolderReader(tmp_path))
    assert targets["w"].tolist() == [0, 1, 2, 3]
    assert targets["lr"] == 0.1
    assert targets["names"] == ["a"]


def test_files_are_read_at_once(tmp_path, monkeypatch):
    write(tmp_path, {f"w{n}": torch.full((3,), float(n)) for n in range(6)})
    barrier = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(reading, "fill", lambda *args, **kwargs: (barrier.wait(), fill(*args, **kwargs)))
    targets = {f"w{n}": torch.zeros(3) for n in range(6)}
    read_into(targets, FolderReader(tmp_path, threads=3))
    assert [value.tolist() for value in targets.values()] == [[n] * 3 for n in range(6)]


def test_what_is_small_is_read_at_once(tmp_path, monkeypatch):
    write(tmp_path, {"small": torch.arange(100.0), "large": torch.arange(100_000.0)})
    seen, stock = [], _ReaderView.seek
    monkeypatch.setattr(_ReaderView, "seek", lambda self, *to: seen.append(self.len) or stock(self, *to))
    targets = {"small": torch.zeros(100), "large": torch.zeros(100_000)}
    read_into(targets, FolderReader(tmp_path))
    assert all(torch.equal(value, torch.arange(float(len(value)))) for value in targets.values())
    assert len([length for length in seen if length < 10_000]) == 1
    assert len([length for length in seen if length > 10_000]) > 10, "torch looks into a file dozens of times"


def test_a_damaged_file_is_refused(tmp_path):
    write(tmp_path, {"w": torch.randn(100_000)})
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, 200_000)
    with pytest.raises(ValueError, match=r"distcp cannot be read: .*Use an earlier checkpoint"):
        read_into({"w": torch.zeros(100_000)}, FolderReader(tmp_path))


@pytest.mark.parametrize("harm", [b"\0" * 40, b"\xff" * 40, b"]" * 40], ids=["zeros", "ones", "lists"])
def test_damaged_metadata_is_refused(tmp_path, harm):
    write(tmp_path, {"w": torch.ones(3)})
    content = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(content[:100] + harm + content[140:])
    with pytest.raises(ValueError, match=r"metadata cannot be read: .*It is damaged: .*Use an earlier checkpoint\.$"):
        FolderReader(tmp_path).read_metadata()


@pytest.mark.parametrize("rank", [None, 1], ids=["one process", "the second of two, which reads alone"])
def test_an_interrupt_is_no_damage(tmp_path, monkeypatch, rank):
    if rank is not None:
        second = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: rank)
        monkeypatch.setattr(reading.folder, "dist", second)
    write(tmp_path, {"w": torch.ones(3)})

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_into({"w": torch.zeros(3)}, FolderReader(tmp_path))


def test_metadata_that_would_run_code_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="Take a checkpoint from a source that you trust"):
        read_into({"w": torch.zeros(1)}, FolderReader(tmp_path))
    assert not os.path.exists("/tmp/lightning_ups_was_here")


class ByName:
    """Is pickled as a member of an enumeration is by Python 3.11.0 to 3.11.3: by `getattr`."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_metadata_that_an_early_python_wrote_is_read(tmp_path, monkeypatch):
    plain = _MEM_FORMAT_ENCODING.__reduce_ex__
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (_MEM_FORMAT_ENCODING, self.name))
    )
    write(tmp_path, {"w": torch.arange(4.0)})
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", plain)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    targets = {"w": torch.zeros(4)}
    read_into(targets, FolderReader(tmp_path))
    assert targets["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_nothing_else_is_looked_up_for_metadata(tmp_path, owner, name):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(ByName(owner, name)))
    with pytest.raises(ValueError, match=r"metadata cannot be read: builtins\.getattr stands in it for Metadata"):
        read_into({"w": torch.zeros(1)}, FolderReader(tmp_path))


def test_a_value_that_would_run_code_is_refused(tmp_path):
    write(tmp_path, {"x": Harmful()})
    with pytest.raises(ValueError, match=r"FSDP2Strategy\(weights_only=False\)"):
        read_into({"x": None}, FolderReader(tmp_path))
    assert not os.path.exists("/tmp/lightning_ups_was_here")


def read_shard():
    mesh = init_device_mesh("cpu", (2,))
    source = torch.arange(30.0).reshape(5, 6)
    target = distribute_tensor(torch.zeros(5, 6), mesh, [Shard(0)])
    read_into({"w": target}, SlicedReader({"w": source}))
    assert torch.equal(target.full_tensor(), source)
    return True


def test_each_rank_reads_its_part_of_a_tensor(ranks):
    assert ranks(read_shard)


def mapped_file(tensor):
    """Return the line of the memory map that has the tensor's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line
    return None


def test_safetensors_in_files_and_folders(tmp_path):
    save_file({"a": torch.arange(6.0).reshape(2, 3).bfloat16(), "s": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    tensors = mapped_safetensors(tmp_path)
    assert all(str(tmp_path / "x.safetensors") in mapped_file(tensors[name]) for name in "as"), "not read yet"
    targets = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "s": torch.zeros(())}
    read_into(targets, SlicedReader(tensors))
    assert targets["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets["s"].item() == 2
    assert list(mapped_safetensors(tmp_path / "y.safetensors")) == ["b"]


def test_what_an_optimizer_keeps_sparse_is_read_whole(tmp_path):
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    for rows in ([1, 4], [4, 5]):
        table(torch.tensor(rows)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    momentum = optimizer.state[table.weight]["momentum_buffer"]
    assert momentum.is_sparse
    target = torch.zeros(6, 2)
    read_into({"m": target}, SlicedReader({"m": momentum}))
    assert torch.equal(target, momentum.to_dense())
    assert target[4, 0] != 0


def test_a_folder_without_safetensors(tmp_path):
    with pytest.raises(ValueError, match=r"Name a .safetensors file or a folder with some\."):
        mapped_safetensors(tmp_path)


class Indirect(Lane):
    def _direct(self, row):
        return False


def part(offsets, lengths):
    index = MetadataIndex("w")
    offsets, lengths = torch.Size(offsets), torch.Size(lengths)
    return ReadItem(LoadItemType.TENSOR, index, torch.Size([0] * len(lengths)), index, offsets, lengths)


class Counting(io.BufferedReader):
    """A file that counts what is read."""

    taken = 0

    def readinto(self, room):
        count = super().readinto(room)
        Counting.taken += count
        return count


class Slow(io.BytesIO):
    """A file that gives little at once."""

    def readinto(self, room):
        return super().readinto(memoryview(room)[:3])


def filled(path, saved, *, offsets, lengths, target=None, lane=None, lead=b"lead"):
    """Fill a target from a file in which the tensor begins after something else."""
    torch.save(saved, path)
    path.write_bytes(lead + path.read_bytes() + b"tail")
    size = path.stat().st_size - len(lead) - 4
    target = torch.zeros(lengths, dtype=saved.dtype) if target is None else target
    reader = FileSystemReader(path.parent)
    with Counting(path.open("rb", buffering=0)) as file:
        view = reader._slice_file(file, type("Place", (), {"offset": len(lead), "length": size}))
        source = RecordReader(file, offset=len(lead), record=None, name=str(path))
        fill(target, part(offsets, lengths), view=view, reader=source, lane=lane or Lane())
    return target


WHOLE = torch.arange(120.0).reshape(4, 5, 6)
PARTS = [
    ((0, 0, 0), (4, 5, 6)),
    ((1, 0, 0), (2, 5, 6)),
    ((2, 1, 0), (1, 3, 6)),
    ((2, 1, 3), (1, 1, 2)),
    ((0, 1, 0), (4, 2, 6)),
    ((1, 0, 2), (3, 5, 1)),
    ((4, 0, 0), (0, 5, 6)),
]


@pytest.mark.parametrize("lane", [Lane, lambda: Indirect(piece=8)], ids=["straight", "by buffers"])
@pytest.mark.parametrize(("offsets", "lengths"), PARTS)
def test_every_part(tmp_path, offsets, lengths, lane):
    found = filled(tmp_path / "w", WHOLE, offsets=offsets, lengths=lengths, lane=lane())
    box = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
    assert torch.equal(found, WHOLE[box])


@pytest.mark.parametrize(("offsets", "lengths"), PARTS)
def test_into_another_type_and_into_a_part_of_something_larger(tmp_path, offsets, lengths):
    around = torch.full((5, 6, 7), -1.0, dtype=torch.float64)
    target = around[: lengths[0], : lengths[1], : lengths[2]]
    filled(tmp_path / "w", WHOLE, offsets=offsets, lengths=lengths, target=target)
    box = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
    assert torch.equal(target, WHOLE[box].double())
    assert (around == -1).sum() == around.numel() - target.numel(), "and nothing beside it"


def test_forms_that_are_no_row_of_bytes(tmp_path):
    for saved in (
        WHOLE.transpose(0, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(2.0),
        WHOLE[:, 1:3],
    ):
        found = filled(tmp_path / "w", saved, offsets=[0] * saved.dim(), lengths=saved.shape)
        assert torch.equal(found, saved)


def test_only_the_part_is_read(tmp_path, monkeypatch):
    whole = torch.randn(1000, 100)
    target = torch.zeros(10, 100)
    monkeypatch.setattr(Counting, "taken", 0)
    filled(tmp_path / "w", whole, offsets=(500, 0), lengths=(10, 100), target=target)
    assert torch.equal(target, whole[500:510])
    assert target.nbytes <= Counting.taken < target.nbytes + 20_000, "and what describes the tensor"


def test_a_system_that_gives_less_at_once():
    room = bytearray(10)
    RecordReader(Slow(bytes(range(20))), offset=0, record=None, name="w").read(memoryview(room), 5)
    assert room == bytes(range(5, 15))


def test_a_file_that_ends_early():
    with pytest.raises(ValueError, match="a file ends before"):
        RecordReader(io.BytesIO(b"123"), offset=0, record=None, name="w").read(memoryview(bytearray(4)), 0)


def test_a_part_of_another_shape(tmp_path):
    with pytest.raises(ValueError, match=r"\(4, 5, 6\) cannot fill one of \(3,\)"):
        filled(tmp_path / "w", WHOLE, offsets=(0, 0, 0), lengths=(4, 5, 6), target=torch.zeros(3))


LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()]]


def resharded(path):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(70.0).reshape(7, 10)
    for before in LAYOUTS:
        for after in LAYOUTS:
            folder = path / f"{before}{after}".replace(" ", "")
            dcp.save({"w": distribute_tensor(whole, mesh, before)}, storage_writer=dcp.FileSystemWriter(folder))
            target = distribute_tensor(torch.zeros(7, 10), mesh, after)
            read_into({"w": target}, FolderReader(folder), group=mesh.get_group())
            assert isinstance(target, DTensor)
            assert torch.equal(target.full_tensor(), whole), (before, after)
    return True


def test_from_every_layout_into_every_other(ranks, tmp_path):
    assert ranks(resharded, tmp_path)


@pytest.mark.gpu(count=1)
def test_into_a_gpu(tmp_path):
    for offsets, lengths in PARTS:
        target = torch.zeros(lengths, device="cuda")
        torch.cuda.synchronize()
        filled(tmp_path / "w", WHOLE, offsets=offsets, lengths=lengths, target=target, lane=Lane(piece=64))
        box = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
        assert torch.equal(target.cpu(), WHOLE[box])
