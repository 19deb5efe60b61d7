import io
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.utils import _ReaderView
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from lightning_ups.state.checkpoint.io import reading
from lightning_ups.state.checkpoint.io.reading import FolderReader, SlicedReader, read_into, safetensors_slices


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/tmp/lightning_ups_was_here",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def write(path, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reads_what_dcp_wrote(tmp_path):
    write(tmp_path, {"w": torch.arange(4.0).bfloat16(), "lr": 0.1, "names": ["a"]})
    targets = {"w": torch.zeros(4, dtype=torch.bfloat16), "lr": None, "names": None}
    read_into(targets, FolderReader(tmp_path))
    assert targets["w"].tolist() == [0, 1, 2, 3]
    assert targets["lr"] == 0.1
    assert targets["names"] == ["a"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_read_at_once(tmp_path, monkeypatch):
    write(tmp_path, {f"w{n}": torch.full((3,), float(n)) for n in range(6)})
    barrier, stock = threading.Barrier(3, timeout=60), reading.fill

    def fill(target, item, **kwargs):
        barrier.wait()
        stock(target, item, **kwargs)

    monkeypatch.setattr(reading, "fill", fill)
    targets = {f"w{n}": torch.zeros(3) for n in range(6)}
    read_into(targets, FolderReader(tmp_path, threads=3))
    assert [value.tolist() for value in targets.values()] == [[n] * 3 for n in range(6)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_small_is_read_at_once(tmp_path, monkeypatch):
    write(tmp_path, {"small": torch.arange(100.0), "large": torch.arange(100_000.0)})
    seen, stock = [], _ReaderView.seek
    monkeypatch.setattr(_ReaderView, "seek", lambda self, *to: seen.append(self.len) or stock(self, *to))
    targets = {"small": torch.zeros(100), "large": torch.zeros(100_000)}
    read_into(targets, FolderReader(tmp_path))
    assert all(torch.equal(value, torch.arange(float(len(value)))) for value in targets.values())
    assert len([length for length in seen if length < 10_000]) == 1
    assert len([length for length in seen if length > 10_000]) > 10, "torch looks into a file dozens of times"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_file_is_refused(tmp_path):
    write(tmp_path, {"w": torch.randn(100_000)})
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, 200_000)
    with pytest.raises(ValueError, match=r"distcp cannot be read: .*Use an earlier checkpoint"):
        read_into({"w": torch.zeros(100_000)}, FolderReader(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("harm", [b"\0" * 40, b"\xff" * 40, b"]" * 40], ids=["zeros", "ones", "lists"])
def test_damaged_metadata_is_refused(tmp_path, harm):
    write(tmp_path, {"w": torch.ones(3)})
    content = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(content[:100] + harm + content[140:])
    with pytest.raises(ValueError, match=r"metadata cannot be read: .*It is damaged: .*Use an earlier checkpoint\.$"):
        FolderReader(tmp_path).read_metadata()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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


class Backwards(StreamTransformExtension):
    """Writes the bytes of each entry in reverse, as a compression would write others."""

    @staticmethod
    def registry_name():
        return "stream.backwards"

    @staticmethod
    def from_descriptor(version):
        return Backwards()

    def get_descriptor(self):
        return "stream.backwards/1"

    def transform_to(self, output):
        class Reversing(io.BytesIO):
            def close(self):
                output.write(self.getvalue()[::-1])
                output.close()
                super().close()

        return Reversing()

    def transform_from(self, input):
        return io.BytesIO(input.read()[::-1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_transformed_is_left_to_torch(tmp_path):
    dcp.save(
        {"w": torch.arange(4.0)}, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Backwards()]), no_dist=True
    )
    reader = FolderReader(tmp_path)
    reader.transforms.extension_registry.extensions["stream.backwards"] = Backwards
    targets = {"w": torch.zeros(4)}
    read_into(targets, reader)
    assert targets["w"].tolist() == [0, 1, 2, 3]


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_would_run_code_is_refused(tmp_path):
    write(tmp_path, {"x": Harmful()})
    with pytest.raises(ValueError, match=r"FSDP2Strategy\(weights_only=False\)"):
        read_into({"x": None}, FolderReader(tmp_path))
    assert not os.path.exists("/tmp/lightning_ups_was_here")


class Counting:
    """A tensor that counts what is read of it."""

    def __init__(self, whole):
        self.whole, self.shape, self.dtype, self.read = whole, whole.shape, whole.dtype, 0

    def __getitem__(self, index):
        part = self.whole[index]
        self.read += part.numel()
        return part


def read_shard():
    mesh = init_device_mesh("cpu", (2,))
    source = Counting(torch.arange(30.0).reshape(5, 6))
    target = DTensor.from_local(
        torch.zeros(3 if mesh.get_local_rank() == 0 else 2, 6), mesh, [Shard(0)], shape=(5, 6), stride=(6, 1)
    )
    read_into({"w": target}, SlicedReader({"w": source}))
    assert torch.equal(target.full_tensor(), source.whole)
    return source.read


def test_a_rank_reads_its_part_only(ranks):
    assert ranks(read_shard) == 18


def test_safetensors_in_files_and_folders(tmp_path):
    save_file({"a": torch.arange(6.0).reshape(2, 3).bfloat16(), "s": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    slices = safetensors_slices(tmp_path)
    targets = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "s": torch.zeros(())}
    read_into(targets, SlicedReader(slices))
    assert targets["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets["s"].item() == 2
    assert list(safetensors_slices(tmp_path / "y.safetensors")) == ["b"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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
        safetensors_slices(tmp_path)
