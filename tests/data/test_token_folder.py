import pickle

import numpy as np
import pytest

from lightning_ups.data.token_folder import TokenFolder, TokenWriter
from tests.token_files import random_documents, token_folder

DOCUMENTS = random_documents(200)
RECIPE = {"tokenizer": "words"}


def test_what_was_written_is_read(tmp_path):
    found = TokenFolder(token_folder(tmp_path, DOCUMENTS))
    assert found.lengths.tolist() == [*map(len, DOCUMENTS)]
    assert found.tokens.dtype == np.uint16
    for start, length, document in zip(found.starts, found.lengths, DOCUMENTS, strict=True):
        assert found.tokens[start : start + length].tolist() == document


def test_a_pickled_folder_has_no_tokens(tmp_path):
    found = TokenFolder(token_folder(tmp_path, DOCUMENTS))
    before = found.tokens.sum()
    content = pickle.dumps(found)
    assert len(content) < 1000
    assert pickle.loads(content).tokens.sum() == before


def test_the_hash_decides_which_documents_are_held_out(tmp_path):
    found = TokenFolder(token_folder(tmp_path, random_documents(4000)))
    small, large = found.held_out(0.1), found.held_out(0.3)
    assert small.mean() == pytest.approx(0.1, abs=0.02)
    assert not (small & ~large).any(), "a document that is held out stays so"
    assert not found.held_out(0).any()


def test_a_folder_without_documents_can_be_read(tmp_path):
    assert len(TokenFolder(token_folder(tmp_path, [])).tokens) == 0


def parts():
    for number in range(4):
        documents = random_documents(5, seed=number)
        lengths = np.array([*map(len, documents)])
        yield np.concatenate(documents), lengths, lengths * 7


@pytest.mark.parametrize("committed", [0, 1, 3])
def test_an_interrupted_writer_continues_with_the_same_bytes(tmp_path, committed):
    def complete(writer):
        for part in [*parts()][writer.done :]:
            writer.append(*part)
        writer.finish(tokenizer="", vocab_size=60)

    complete(TokenWriter(tmp_path / "whole", recipe=RECIPE, dtype="uint16"))
    first = TokenWriter(tmp_path / "cut", recipe=RECIPE, dtype="uint16")
    for number, part in enumerate(parts()):
        if number == committed:
            first.commit()
        first.append(*part)
    first.close()
    with pytest.raises(FileNotFoundError, match="interrupted"):
        TokenFolder(tmp_path / "cut")
    again = TokenWriter(tmp_path / "cut", recipe=RECIPE, dtype="uint16")
    assert again.done == committed
    complete(again)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_other_settings_and_other_files_are_refused(tmp_path):
    token_folder(tmp_path / "done", DOCUMENTS)
    with pytest.raises(ValueError, match="tokenizer words -> bytes"):
        TokenWriter(tmp_path / "done", recipe={"tokenizer": "bytes", "source": ["toy"]}, dtype="uint16")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="tokenize did not write"):
        TokenWriter(tmp_path, recipe=RECIPE, dtype="uint16")


def test_missing_and_incomplete_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokens\.json"):
        TokenFolder(tmp_path)
    path = token_folder(tmp_path, DOCUMENTS)
    (tmp_path / "tokens.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"tokens\.bin has 2 bytes"):
        TokenFolder(path)
