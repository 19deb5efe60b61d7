"""Flipped bits in every file of a checkpoint, and what verifying reads."""

import io
import itertools
import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.state.checkpoint import Saver, consolidated, folder, load_weights, meta, resolve
from lightning_ups.state.checkpoint import checksums as sums
from lightning_ups.state.checkpoint.checksums import (
    DamagedFileError,
    Piece,
    RecordReader,
    SummedRecord,
    Verifier,
    checksum,
)
from lightning_ups.state.checkpoint.io import lanes, reading
from lightning_ups.state.checkpoint.io.lanes import Lane
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into

CHUNK = sums.CHUNK
FLIPS = 240  # over all files of one folder


def saved(path, *, threads=2, seed=0):
    """Save weights, optimizer state, values that are no tensors, and the two files beside them."""
    torch.manual_seed(seed)
    weights = {f"layers.{index}.weight": torch.randn(50, 40) for index in range(2)}
    weights |= {"large": torch.randn(700, 500), "scalar": torch.tensor(3.0), "conj": torch.randn(9, 7).mT}
    moments = {name: {"exp_avg": torch.randn_like(value), "step": torch.tensor(7.0)} for name, value in weights.items()}
    group = {"params": [*weights], "lr": 1e-3, "betas": (0.9, 0.95)}
    state = {"state_dict": weights, "optimizer_0": {"state": moments, "param_groups": [group]}}
    files = {"meta.pt": meta.dumped({"epoch": seed, "loops": {"batches": [1, 2, 3]}})}
    files["apart.pt"] = meta.dumped({"hyper_parameters": {"width": 40, "name": "toy"}})
    Saver(asynchronous=False, threads=threads).save(state, files=files, path=path, facts={"global_step": 7})
    return path


def write_record(path, pieces, *, lead=b"", head=b"", tail=b"", chunk=CHUNK):
    """Write a record after ``lead``, and return it."""
    with path.open("wb") as file, ThreadPoolExecutor(1) as helpers:
        file.write(lead)
        record = SummedRecord(file, helpers, chunk=chunk)
        record.write_head(head)
        record.write_body(pieces)
        return record.write_tail(tail)


@pytest.fixture
def slow_sums(monkeypatch):
    """Let helpers be slower than the disk."""
    stock = sums._sums
    monkeypatch.setattr(sums, "_sums", lambda *args: (time.sleep(0.05), stock(*args))[1])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flips(path, generator):
    """Return bits of all files: as many in each small file as in each large one, at its ends and between."""
    files = sorted(entry for entry in path.iterdir() if entry.stat().st_size)
    for number in range(FLIPS):
        file = files[number % len(files)]
        bits = 8 * file.stat().st_size
        yield file, {0: 0, 1: bits - 1}.get(number // len(files), generator.randrange(bits))


def loaded(path):
    try:
        return consolidated(resolve(path))[0], None
    except (ValueError, FileNotFoundError) as error:
        return None, str(error)


def test_no_flipped_bit_is_loaded(tmp_path):
    path = saved(tmp_path / "a")
    before, _ = consolidated(resolve(path))
    refused, harmless = {}, 0
    for file, bit in flips(path, random.Random(0)):
        flip(file, bit)
        after, error = loaded(path)
        if error is None:
            harmless += 1
            assert same(before, after), f"bit {bit} of {file.name} was loaded"
        else:
            refused[file.name] = refused.get(file.name, 0) + 1
            assert file.name in error, (file.name, bit, error)
        flip(file, bit)
    assert same(before, consolidated(resolve(path))[0])
    assert {*refused} == {entry.name for entry in path.iterdir()}, "a flip in each file was noticed"
    assert sum(refused.values()) >= 200
    assert harmless + sum(refused.values()) == FLIPS


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096 + 5, CHUNK, CHUNK + 1])
def test_a_checksum_of_pieces_is_that_of_the_whole(tmp_path, size):
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert checksum(data) == sums.checksum_of_file(tmp_path / "file")
    assert checksum(data[4096:], checksum(data[:4096])) == checksum(data)


def test_rows_that_change_places_change_the_checksum():
    data = random.Random(0).randbytes(3 * 4096)
    assert checksum(data) != checksum(data[4096:8192] + data[:4096] + data[8192:])


def test_a_part_verifies_the_chunks_that_it_reads_and_no_others(tmp_path):
    data, path = random.Random(0).randbytes(1000), tmp_path / "file"
    pieces = [Piece(memoryview(data)[:128]), Piece(memoryview(data)[128:])]
    record = write_record(path, pieces, lead=b"other", head=b"head", tail=b"tail", chunk=64)
    flip(path, 8 * (5 + 4 + 300))  # in the chunk from 256 to 320
    with path.open("rb") as file:
        for start, length in [(0, 256), (0, 10), (63, 2), (60, 196), (320, 680), (999, 1), (330, 0)]:
            room = bytearray(length)
            reader = RecordReader(file, offset=5, record=record, name="file")
            reader.ends()
            reader.read(memoryview(room), 4 + start)
            assert room == data[start : start + length], "other chunks can be read"
        for start, length in [(0, 1000), (0, 257), (319, 2), (256, 64), (280, 1)]:
            with pytest.raises(DamagedFileError, match="file is damaged"):
                RecordReader(file, offset=5, record=record, name="file").read(memoryview(bytearray(length)), 4 + start)
        with pytest.raises(DamagedFileError):
            RecordReader(file, offset=5, record=record, name="file").verify()


def test_what_helpers_verify_is_refused_before_the_tensor_is_used(tmp_path):
    """A tensor of many pieces: each is verified while the next one is read."""
    path, weight = tmp_path / "a", torch.randn(30 * 2**20 // 4)
    Saver(asynchronous=False, threads=1).save({"state_dict": {"w": weight}}, files={}, path=path)
    file, places = path / "__0_0.distcp", [10_000, 9 * 2**20, 17 * 2**20, 30 * 2**20]
    for place in places:
        flip(file, 8 * place)
        with pytest.raises(DamagedFileError, match=file.name):
            read_into({"state_dict.w": torch.zeros(30 * 2**20 // 4)}, FolderReader(path))
        flip(file, 8 * place)
    target = torch.zeros(30 * 2**20 // 4)
    read_into({"state_dict.w": target}, FolderReader(path))
    assert torch.equal(target, weight)


def test_the_end_of_a_tensor_is_verified_while_the_next_one_is_read(tmp_path, monkeypatch):
    tensors = {f"w{index}": torch.randn(2**18) for index in range(3)}
    Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=tmp_path / "a")
    reads, summed, stock = [], [], sums._sums
    may_end = threading.Event()

    def slow(view, chunk):
        summed.append(len(reads))
        assert may_end.wait(10)
        return stock(view, chunk)

    def noted(self, room, place):
        reads.append(len(room))
        if len([size for size in reads if size >= 2**20]) > 1:
            may_end.set()
        plain(self, room, place)

    plain = RecordReader._read
    monkeypatch.setattr(RecordReader, "_read", noted)
    monkeypatch.setattr(sums, "_sums", slow)
    targets = {f"state_dict.{name}": torch.zeros(2**18) for name in tensors}
    read_into(targets, FolderReader(tmp_path / "a", threads=1))
    assert len(summed) == 3, "each tensor is verified"
    for name, weight in tensors.items():
        assert targets[f"state_dict.{name}"].equal(weight)


@pytest.mark.usefixtures("slow_sums")
def test_a_part_of_a_chunk_is_read_when_what_was_read_before_is_verified(tmp_path):
    data, path = random.Random(0).randbytes(2**20), tmp_path / "file"
    record = write_record(path, [Piece(memoryview(data))], chunk=2**19)
    with path.open("rb") as file, ThreadPoolExecutor(1) as helpers:
        reader = RecordReader(file, offset=0, record=record, name="file", verifier=(verifier := Verifier(helpers)))
        room = bytearray(2**19)
        reader.read(memoryview(room), 0)
        reader.read(memoryview(bytearray(10)), 3)
        room[:] = bytes(2**19)
        verifier.wait()


@pytest.mark.usefixtures("slow_sums")
@pytest.mark.parametrize("by", [[False], [True], [False, True, True], [True, False]], ids=str)
@pytest.mark.parametrize("sizes", [[2**18, 3, 2**18], [5 * 2**19, 2**18, 2**10, 2**21, 7]])
def test_no_buffer_is_filled_while_it_is_verified(tmp_path, monkeypatch, sizes, by):
    """As those of a GPU: two buffers for all tensors of a thread, and helpers that are slower than the disk."""
    turns, stock_decision = itertools.cycle(by), sums.worth_summing_on_device
    monkeypatch.setattr(sums, "worth_summing_on_device", lambda row: stock_decision(row) and next(turns))
    tensors = {f"w{index}": torch.randn(size) for index, size in enumerate(sizes)}
    Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=tmp_path / "a")
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    monkeypatch.setattr(Lane.__init__, "__kwdefaults__", {"piece": 2**20})
    targets = {f"state_dict.{name}": torch.zeros_like(weight) for name, weight in tensors.items()}
    read_into(targets, FolderReader(tmp_path / "a", threads=1))
    for name, weight in tensors.items():
        assert targets[f"state_dict.{name}"].equal(weight)


EDGES = [0, 1, 4095, 4096, 2**18 - 1, 2**18, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5000]


def save_at_edges(path, *, device="cpu", offset=0):
    """Save bytes of sizes around rows, chunks and pieces, each a view that begins ``offset`` bytes into its memory."""
    generator = torch.Generator().manual_seed(0)
    memory = [torch.randint(256, (offset + size,), dtype=torch.uint8, generator=generator) for size in EDGES]
    tensors = {f"w{each.numel()}": each.to(device)[offset:] for each in memory}
    Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=path)
    return {f"state_dict.{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def device_sums(patch):
    """Give a list of how many bytes of tensors the device has summed, one entry for each tensor."""
    found, stock = [], lanes.device_sums

    def noted(data):
        found.extend(each.nbytes for each in data)
        return stock(data)

    with patch.context() as inner:
        inner.setattr(lanes, "device_sums", noted)
        yield found


@pytest.mark.parametrize("offset", [0, 8, 4096, 3, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=1))])
def test_the_device_computes_the_sums_that_the_host_computes(tmp_path, monkeypatch, device, offset):
    """A CPU takes the part of the GPU where there is none: buffers are used, and torch adds up the rows."""
    save_at_edges(tmp_path / "host", offset=offset)
    if device == "cpu":
        monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    whole_chunks = [2**18, CHUNK, CHUNK, 2 * CHUNK] if offset % 8 == 0 else []
    with device_sums(monkeypatch) as summed:
        tensors = save_at_edges(tmp_path / "device", device=device, offset=offset)
    assert sorted(summed) == whole_chunks, "the others are smaller than 256 KiB, or not aligned to 8 bytes"
    contents = [(tmp_path / name / sums.CHECKSUMS).read_bytes() for name in ("host", "device")]
    assert contents[0] == contents[1]
    targets = {
        name: torch.zeros(offset + each.numel(), dtype=torch.uint8, device=device) for name, each in tensors.items()
    }
    targets = {name: memory[offset:] for name, memory in targets.items()}
    with device_sums(monkeypatch) as summed:
        read_into(targets, FolderReader(tmp_path / "host", threads=1))
    assert sorted(summed) == whole_chunks, "the host verifies a last chunk that is not whole rows"
    assert same(targets, tensors)


@pytest.mark.parametrize(("batch", "expected"), [(3, [3]), (2, [2, 1]), (1, [1, 1, 1])])
def test_a_device_sums_many_tensors_at_once_when_a_thread_has_filled_them(tmp_path, monkeypatch, batch, expected):
    """A thread that launched them while it reads would make the others wait for it in Python."""
    tensors, seen = {f"w{index}": torch.randn(CHUNK // 4) for index in range(3)}, []
    Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=tmp_path / "a")
    targets, stock = (
        {f"state_dict.{name}": torch.zeros_like(weight) for name, weight in tensors.items()},
        lanes.device_sums,
    )

    def noted(data):
        seen.append(len(data))
        assert all(targets[f"state_dict.{name}"].equal(weight) for name, weight in tensors.items())
        return stock(data)

    with monkeypatch.context() as patch:
        patch.setattr(lanes, "device_sums", noted)
        patch.setattr(lanes, "BATCH", batch * CHUNK)
        patch.setattr(Lane, "_direct", lambda self, row: False)
        read_into(targets, FolderReader(tmp_path / "a", threads=1))
    assert seen == expected
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    assert all(targets[f"state_dict.{name}"].equal(weight) for name, weight in tensors.items())
    (file,) = (tmp_path / "a").glob("*.distcp")
    flip(file, 8 * 2**18)
    with pytest.raises(DamagedFileError, match=file.name):
        read_into(targets, FolderReader(tmp_path / "a", threads=1))


def test_a_checkpoint_with_checksums_of_the_first_kind_is_loaded_unverified(tmp_path, monkeypatch):
    tensors = {"w": torch.randn(3 * 2**18)}
    with monkeypatch.context() as patch:
        patch.setattr(folder, "FORMAT", folder.UNVERIFIED)
        patch.setattr(sums, "_sums", lambda view, chunk: [0] * -(-len(view) // chunk))
        Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=tmp_path / "a")
    targets = {"state_dict.w": torch.zeros_like(tensors["w"])}
    read_into(targets, FolderReader(tmp_path / "a", threads=1))
    assert same(targets, {"state_dict.w": tensors["w"]})
    assert not folder.has_checksums(tmp_path / "a")
    with pytest.raises(ValueError, match="no checksums that can be verified"):
        folder.damaged(tmp_path / "a")


def test_torch_parses_each_kind_of_tensor_once(tmp_path, monkeypatch):
    kinds = {"a": torch.randn(300, 200), "b": torch.randn(200, 300), "c": torch.randn(300, 200).half()}
    kinds["d"] = torch.randn(200, 300).t()  # in another order of memory
    tensors = {f"{index}.{name}": each + index for index in range(3) for name, each in kinds.items()}
    Saver(asynchronous=False, threads=1).save({"state_dict": tensors}, files={}, path=tmp_path / "a")
    parsed, stock = [], reading.template
    monkeypatch.setattr(reading, "template", lambda file: (parsed.append(file), stock(file))[1])
    targets = {f"state_dict.{name}": torch.zeros_like(weight) for name, weight in tensors.items()}
    read_into(targets, FolderReader(tmp_path / "a", threads=1))
    assert len(parsed) == len(kinds)
    assert all(targets[f"state_dict.{name}"].equal(weight) for name, weight in tensors.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=1))])
@pytest.mark.parametrize(
    "word", [-1, torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min, 1, 0x3FF0000000000000]
)
def test_sums_wrap_around_on_the_device_as_on_the_host(device, word):
    chunk = 2**14
    data = [torch.full((size // 8,), word).view(torch.uint8) for size in (2**12, 5 * 2**12, 2**15)]
    host = [found for each in data for found in sums._sums(memoryview(each.numpy()), chunk)]
    found = sums.device_sums([each.to(device) for each in data], chunk)
    assert found.cpu().numpy().view("<u8").tolist() == host
    assert len(host) == 1 + 2 + 2


@pytest.mark.parametrize("size", [512, 4096])
def test_a_bit_and_two_sectors_or_pages_that_change_places_change_the_checksum_of_a_chunk(size):
    """Rows of one value each have sums that differ in few bits."""
    rows = torch.tensor([float(2**index) for index in range(8)], dtype=torch.float64)
    rows = rows.repeat_interleave(size // 8).view(8, -1)
    chunk = 8 * size
    (before,) = sums._sums(memoryview(rows.view(-1).view(torch.uint8).numpy()), chunk)
    found = {before}
    for one, other in itertools.combinations(range(len(rows)), 2):
        swapped = rows.clone()
        swapped[[one, other]] = rows[[other, one]]
        found |= {*sums._sums(memoryview(swapped.view(-1).view(torch.uint8).numpy()), chunk)}
    data = bytearray(rows.numpy().tobytes())
    for bit in range(0, 8 * chunk, 4093):
        data[bit // 8] ^= 1 << bit % 8
        found |= {*sums._sums(memoryview(data), chunk)}
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * 7 // 2 + len(range(0, 8 * chunk, 4093))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=1))])
def test_flips_are_found_by_the_sums_of_the_device(tmp_path, monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    tensors = save_at_edges(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    generator, bits = random.Random(0), 8 * file.stat().st_size
    for _ in range(40):
        bit, targets = (
            generator.randrange(bits),
            {name: torch.zeros_like(t, device=device) for name, t in tensors.items()},
        )
        flip(file, bit)
        with pytest.raises(DamagedFileError, match=file.name):
            read_into(targets, FolderReader(tmp_path / "a", threads=1))
        flip(file, bit)


@pytest.mark.parametrize("size", [2**20, 20 * 2**20])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=1))])
def test_bytes_that_change_on_the_way_to_the_device_are_refused(tmp_path, monkeypatch, device, size):
    def changed(data):
        data[-1][-4096] ^= 1
        return stock(data)

    stock = lanes.device_sums
    if device == "cpu":
        monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    Saver(asynchronous=False).save({"w": torch.randn(size // 4)}, files={}, path=tmp_path / "a")
    monkeypatch.setattr(lanes, "device_sums", changed)
    with pytest.raises(DamagedFileError, match="distcp is damaged"):
        read_into({"w": torch.zeros(size // 4, device=device)}, FolderReader(tmp_path / "a"))


def test_a_device_without_memory_for_sums_leaves_them_to_the_host(tmp_path, monkeypatch):
    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.sum.IntList_out:
                refused.append(args[0].shape)
                raise torch.OutOfMemoryError("full")
            return function(*args, **(kwargs or {}))

    refused = []
    tensors = save_at_edges(tmp_path / "host")
    targets = {name: torch.zeros_like(each) for name, each in tensors.items()}
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    with Full():
        save_at_edges(tmp_path / "device")
        assert refused.pop(), "the sums of the device were requested"
        read_into(targets, FolderReader(tmp_path / "host", threads=1))
        assert refused.pop()
    contents = [(tmp_path / name / sums.CHECKSUMS).read_bytes() for name in ("host", "device")]
    assert contents[0] == contents[1]
    assert same(targets, tensors)


def test_a_part_of_a_saved_tensor_is_verified_on_the_device_too(tmp_path, monkeypatch):
    """Its first and its last chunk are read in part, by the host; the whole ones between begin at an odd place."""
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    whole = torch.randint(256, (3 * CHUNK + 100,), dtype=torch.uint8)
    record = write_record(tmp_path / "file", Lane().pieces(whole))
    for start, end, on_device in [(1000, 3 * CHUNK + 8, [2 * CHUNK]), (1001, 3 * CHUNK + 50, []), (5, CHUNK - 1, [])]:
        target, lane = torch.zeros(end - start, dtype=torch.uint8), Lane()
        with (tmp_path / "file").open("rb") as file, device_sums(monkeypatch) as summed:
            reader = RecordReader(file, offset=0, record=record, name="file")
            lane.fill(target, reader, start)
            lanes.verify(lane)
        assert target.equal(whole[start:end])
        assert summed == on_device


@pytest.mark.parametrize("flipped", [None, 100, 2**20 + 5, 9 * 2**20, 17 * 2**20 + 7])
def test_a_part_that_begins_within_a_chunk_is_verified_in_all_its_pieces(tmp_path, monkeypatch, flipped):
    """The chunk that lies in two pieces is verified by the host, between rows that the device adds up."""
    monkeypatch.setattr(Lane, "_direct", lambda self, row: False)
    whole = torch.randint(256, (20 * 2**20,), dtype=torch.uint8)
    record = write_record(tmp_path / "file", Lane().pieces(whole))
    if flipped is not None:
        flip(tmp_path / "file", 8 * (2**19 + flipped))
    target, lane = torch.zeros(18 * 2**20, dtype=torch.uint8), Lane()
    with (tmp_path / "file").open("rb") as file:
        reader = RecordReader(file, offset=0, record=record, name="file")
        with nullcontext() if flipped is None else pytest.raises(DamagedFileError, match="file is damaged"):
            lane.fill(target, reader, 2**19)
            lane.settle()
            lanes.verify(lane)
    if flipped is None:
        assert target.equal(whole[2**19 : 2**19 + len(target)])


def test_a_place_outside_of_a_record_is_refused():
    file = io.BytesIO(bytes(2**13))
    record = sums.Record(2**13, 0, 2**12, (0, checksum(bytes(2**12)), 0), 2**12)
    for place, length in [(2**12, 100), (0, 2**12 + 1)]:
        with pytest.raises(DamagedFileError, match="file is damaged"):
            RecordReader(file, offset=0, record=record, name="file").read(memoryview(bytearray(length)), place)


@pytest.mark.parametrize("place", [3, -3])
def test_what_describes_a_tensor_is_verified_before_it_is_read(tmp_path, place):
    path = saved(tmp_path / "a", threads=1)
    [file] = path.glob("*.distcp")
    entries = FolderReader(path).read_metadata().storage_data
    large = next(entry for index, entry in entries.items() if index.fqn == "state_dict.large")
    flip(file, 8 * (large.offset + (place if place > 0 else large.length + place)))
    with pytest.raises(DamagedFileError, match=file.name):
        read_into({"state_dict.large": torch.zeros(700, 500)}, FolderReader(path))
    read_into({"state_dict.scalar": torch.zeros(())}, FolderReader(path)), "others can be read"


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", seed=1)
    for name in ("__0_0.distcp", "meta.pt", "checksums.json"):
        shutil.copyfile(one / name, tmp_path / "kept")
        if (one / name).stat().st_size == (other / name).stat().st_size:
            shutil.copyfile(other / name, one / name)
        else:
            (one / name).write_bytes((other / name).read_bytes()[: (one / name).stat().st_size])
        with pytest.raises((ValueError, FileNotFoundError), match=name):
            consolidated(resolve(one))
        shutil.copyfile(tmp_path / "kept", one / name)
    consolidated(resolve(one))


def test_one_without_checksums_is_loaded(tmp_path):
    """As checkpoints were written before there were checksums."""
    path = saved(tmp_path / "a")
    assert folder.has_checksums(path)
    before, _ = consolidated(path)
    marker = json.loads((path / folder.MARKER).read_text())
    for name in (sums.CHECKSUMS, "tensors.json"):
        (path / name).unlink()
        del marker["files"][name]
    del marker["checksum"], marker["checksums"]
    (path / folder.MARKER).write_text(json.dumps(marker))
    assert not folder.has_checksums(path)
    assert same(before, consolidated(resolve(path))[0])


def test_every_rank_hears_of_damage_that_one_has_read(ranks, tmp_path):
    assert "__1_0.distcp is damaged" in ranks(damaged_for_one, tmp_path)


def damaged_for_one(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {"state_dict": {"weight": distribute_tensor(torch.arange(400_000.0).reshape(1000, 400), mesh, [Shard(0)])}}
    saver = Saver(asynchronous=False, threads=1)
    saver.save(state, files={"meta.pt": meta.dumped({})}, path=path / "a")
    if mesh.get_rank() == 0:
        flip(path / "a" / "__1_0.distcp", 5_000_000)
    torch.distributed.barrier()
    module = torch.nn.Linear(400, 1000, bias=False)
    module.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(1000, 400), mesh, [Shard(0)]))
    with pytest.raises(DamagedFileError) as error:
        load_weights(module, path / "a", group=saver.group)
    saver.close()
    return str(error.value)


def test_a_whole_checkpoint_is_checked(tmp_path):
    path = saved(tmp_path / "a")
    assert folder.damaged(path) == []
    for name in sorted(entry.name for entry in path.iterdir() if entry.name != folder.MARKER):
        middle = 8 * ((path / name).stat().st_size // 2)
        flip(path / name, middle)
        assert folder.damaged(path) == [name]
        flip(path / name, middle)
    assert folder.damaged(path) == []


def test_one_file_is_checked(tmp_path):
    folder.write_file(tmp_path / "one.ckpt", {"state_dict": {"w": torch.randn(100, 100)}})
    assert folder.damaged(tmp_path / "one.ckpt") == []
    flip(tmp_path / "one.ckpt", 8 * 20_000)
    assert folder.damaged(tmp_path / "one.ckpt") == ["one.ckpt"]


def test_the_form_of_the_file_of_checksums():
    stream = io.BytesIO()
    record = SummedRecord(stream, ThreadPoolExecutor(1))
    record.write_head(b"head")
    record.write_body([Piece(memoryview(b"body"))])
    record = record.write_tail(b"")
    assert stream.getvalue() == b"headbody"
    assert [*record.spans()] == [(0, 4), (4, 8), (8, 8)]
    assert sums.from_json(json.loads(sums.as_json({("file", 3): record}))) == {("file", 3): record}
