import pickle

import pytest
import torch

from lightning_ups.data.latents.store import Latents, LatentsWriter

LEAVES = [torch.randn(6, 3, 2), torch.arange(6), torch.randn(6, 5).bfloat16(), torch.tensor([True, False] * 3)]


def write(path, samples, *, at=0):
    writer = LatentsWriter(path)
    writer.append(samples, ["tuple", 0, 1, 2, 3], [leaf[at : at + len(samples)] for leaf in LEAVES])
    return writer


def test_rows_come_back_as_they_were_in_any_order(tmp_path):
    write(tmp_path, [4, 0, 2]).close()
    write(tmp_path, [5, 1], at=3).close()
    latents = Latents(tmp_path, 8)
    latents.refresh()
    assert latents.count == 5
    there, found = pickle.loads(pickle.dumps(latents)).read([1, 3, 4, 4, 7, 2])
    assert there.tolist() == [True, False, True, True, False, True]
    for leaf, read in zip(LEAVES, found, strict=True):
        assert read.dtype == leaf.dtype
        assert torch.equal(read, leaf[[4, 0, 0, 2]])


def test_a_reader_finds_rows_that_are_written_later(tmp_path):
    latents = Latents(tmp_path, 8)
    assert latents.read([0, 1]) == (pytest.approx([0, 0]), ())
    writer = write(tmp_path, [0])
    assert latents.read([0, 1])[0].tolist() == [True, False]
    writer.append([1], ["tuple", 0, 1, 2, 3], [leaf[:1] for leaf in LEAVES])
    assert latents.read([0, 1])[0].tolist() == [True, True]


def test_an_interrupted_append_leaves_whole_rows(tmp_path):
    writer = write(tmp_path, [0, 1])
    for path in tmp_path.glob("*.0"):
        path.write_bytes(path.read_bytes() + b"half of a row")
    with next(tmp_path.glob("*.index")).open("ab") as file:
        file.write(b"half")
    latents = Latents(tmp_path, 2)
    there, found = latents.read([1, 0])
    assert there.all()
    assert torch.equal(found[0], LEAVES[0][[1, 0]])
    writer.close()


def test_a_changed_bit_or_lost_bytes_are_found(tmp_path):
    write(tmp_path, [0, 1, 2]).close()
    (path,) = tmp_path.glob("*.0")
    content = bytearray(path.read_bytes())
    content[24] ^= 4
    path.write_bytes(content[:-24] + bytes(24))
    there, found = Latents(tmp_path, 3).read([0, 1, 2])
    assert there.tolist() == [True, False, False]
    assert torch.equal(found[0], LEAVES[0][:1])
    path.write_bytes(content[:24])
    assert Latents(tmp_path, 3).read([0, 1, 2])[0].tolist() == [True, False, False]


def test_another_shape_is_refused(tmp_path):
    write(tmp_path, [0]).close()
    with pytest.raises(ValueError, match="samples of one shape"):
        LatentsWriter(tmp_path).append([1], ["tuple", 0], [torch.zeros(1, 3)])
