import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from lightning_ups.state.checkpoint.checksums import RecordReader
from lightning_ups.state.checkpoint.io.filling import fill
from lightning_ups.state.checkpoint.io.lanes import Lane
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
