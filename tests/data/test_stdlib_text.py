import math
import os
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_ups.data import StdlibText
from tests.toys import trainer


@pytest.fixture(scope="module")
def library():
    data = StdlibText()
    data.setup("fit")
    return data


def folder(path, *, reverse=False):
    """Forty files of the text 'file N' over and over, and some that are to be left out."""
    names = [f"{'inner/' if number % 2 else ''}m{number}.py" for number in range(40)]
    outside = [
        "tests/t.py",
        "inner/test/t.py",
        "site-packages/p.py",
        "encodings/e.py",
        "_sysconfigdata_x.py",
        "readme.txt",
    ]
    for name in sorted([*names, *outside], reverse=reverse):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"<{name}>" * 40)
    return names


def made(path, **options):
    data = StdlibText(root=str(path), **{"seq_len": 8, "hold_out_one_in": 4, **options})
    data.setup("fit")
    return data


# --- which files


def test_the_standard_library_is_found_and_read_in_a_second(library):
    assert "argparse.py" in library.train_files + library.val_files
    assert len(library.train_tokens) > 5_000_000
    assert 0.02 < len(library.val_tokens) / len(library.train_tokens) < 0.12
    assert library.train_tokens.dtype == torch.uint8


def test_each_file_is_for_training_or_validation(tmp_path):
    names = folder(tmp_path)
    data = made(tmp_path)
    assert sorted(data.train_files + data.val_files) == sorted(names)
    assert not {*data.train_files} & {*data.val_files}
    assert 4 <= len(data.val_files) <= 16


def test_held_out_files_are_never_trained_on(tmp_path):
    folder(tmp_path)
    data = made(tmp_path, seq_len=19)
    trained = {data.decode(row) for batch in data.train_dataloader() for row in batch.tolist()}
    validated = {data.decode(row) for batch in data.val_dataloader() for row in batch.tolist()}
    assert data.val_files
    for name in data.val_files:
        assert not any(f"<{name}>" in text for text in trained)
        assert any(f"<{name}>" in text for text in validated)
    assert any(f"<{data.train_files[0]}>" in text for text in trained)


def test_the_order_of_the_folder_does_not_matter(tmp_path, monkeypatch):
    folder(tmp_path / "a")
    folder(tmp_path / "b", reverse=True)
    first = made(tmp_path / "a")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((f, d, files[::-1]) for f, d, files in walk(top)))
    second = made(tmp_path / "b")
    assert (second.train_files, second.val_files) == (first.train_files, first.val_files)
    assert torch.equal(second.train_tokens, first.train_tokens)


def test_a_folder_without_source_files_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"0 source files.*StdlibText\(root=\.\.\.\)\.$"):
        made(tmp_path)


def test_files_that_are_all_for_training_are_an_error(tmp_path):
    folder(tmp_path)
    with pytest.raises(RuntimeError, match=r"StdlibText\(root=\.\.\.\), or a smaller seq_len or hold_out_one_in\.$"):
        made(tmp_path, hold_out_one_in=10**6)


def test_only_regular_files_are_read(tmp_path):
    names = folder(tmp_path)
    (tmp_path / ".#open.py").symlink_to("somebody@a.machine:1234")  # as an editor marks a file that it has open
    (tmp_path / "folder.py").mkdir()
    data = made(tmp_path)
    assert sorted(data.train_files + data.val_files) == sorted(names)


# --- entropy


def test_numpy_integers_are_accepted(tmp_path):
    folder(tmp_path)
    names = ("batch_size", "hold_out_one_in", "num_crops", "seed")
    one, other = (made(tmp_path, **dict.fromkeys(names, kind(4))) for kind in (numpy.int64, int))
    assert torch.equal(next(iter(one.train_dataloader())), next(iter(other.train_dataloader())))


def test_an_epoch_without_a_whole_batch_is_refused(tmp_path):
    folder(tmp_path)
    with pytest.raises(ValueError, match=r"num_crops=3\) has fewer.*Use num_crops=4 or more"):
        made(tmp_path, num_crops=3, batch_size=4).train_dataloader()
    two = made(tmp_path, num_crops=7, batch_size=4)
    two.trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"num_crops=7\) has fewer.*of 4 on each device.*Use num_crops=8 or more"):
        two.train_dataloader()


def test_entropy_of_the_training_bytes(tmp_path):
    folder(tmp_path)
    data = made(tmp_path)
    counts = Counter(b"\0".join((tmp_path / name).read_bytes() for name in data.train_files))
    total = sum(counts.values())
    assert data.unigram_entropy == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()))


# --- batches


def test_batches_are_bytes_with_one_more_than_is_predicted(library):
    batch = next(iter(library.train_dataloader()))
    assert batch.shape == (8, 257)
    assert batch.dtype == torch.uint8


def test_training_repeats_from_the_seed_and_validation_always(tmp_path):
    folder(tmp_path)

    def some(loader):
        return torch.cat([batch for batch, _ in zip(loader, range(3), strict=False)])

    first, again, other = made(tmp_path), made(tmp_path), made(tmp_path, seed=1)
    assert torch.equal(some(first.train_dataloader()), some(again.train_dataloader()))
    assert not torch.equal(some(first.train_dataloader()), some(other.train_dataloader()))
    assert torch.equal(some(first.val_dataloader()), some(other.val_dataloader()))


def test_batch_size_follows_the_device(library, tmp_path):
    assert library.train_dataloader().batch_size == 8
    try:
        library.trainer = trainer(tmp_path)
        assert (library.train_dataloader().batch_size, library.train_dataloader().pin_memory) == (8, False)
    finally:
        library.trainer = None


@pytest.mark.gpu
def test_batches_for_a_gpu_are_large_and_pinned(library, tmp_path):
    try:
        library.trainer = Trainer(accelerator="gpu", devices=1, logger=False, default_root_dir=tmp_path)
        batch = next(iter(library.train_dataloader()))
        assert batch.shape == (512, 257)
        assert batch.is_pinned()
    finally:
        library.trainer = None


def test_encoding_and_decoding():
    data = StdlibText()
    assert data.decode(data.encode("def f(): 'naïve'\n")) == "def f(): 'naïve'\n"
    assert data.decode([255, 0, 65]) == "\\xff\nA"
