import json
import pickle
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest

from lightning_ups._compat.optional import tokenizers
from lightning_ups._compat.optional.tokenizers import Encoder, load_encoding
from tests.token_files import WORDS, tokenizer

pytest.importorskip("tokenizers")


def saved(tmp_path, made=None, **config):
    (made or tokenizer()).save(str(tmp_path / "tokenizer.json"))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_documents_become_tokens_with_their_end(tmp_path):
    encoding = load_encoding(saved(tmp_path), bos=None, eos=None)
    assert (encoding.begin, encoding.end, encoding.vocab_size, encoding.dtype) == ([], [0], len(WORDS), "uint16")
    tokens, lengths, hashes = pickle.loads(pickle.dumps(Encoder(encoding)))(["w1 w2", "w3", "w1 w2"])
    assert tokens.tolist() == [2, 3, 0, 4, 0, 2, 3, 0]
    assert lengths.tolist() == [3, 2, 3]
    assert hashes[0] == hashes[2] != hashes[1]
    assert Encoder(encoding).one("w1 w2").tolist() == [2, 3, 0]


def test_no_document_gives_empty_arrays(tmp_path):
    tokens, lengths, hashes = Encoder(load_encoding(saved(tmp_path), bos=None, eos=None))([])
    assert len(tokens) == len(lengths) == len(hashes) == 0


def test_what_the_tokenizer_adds_begins_and_ends_a_document(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()
    made.post_processor = TemplateProcessing(single="w7 $A w8", special_tokens=[("w7", 8), ("w8", 9)])
    path = saved(tmp_path, made)
    assert load_encoding(path, bos=None, eos=None)[1:3] == ([8], [9])
    assert load_encoding(path, bos="none", eos="w3")[1:3] == ([], [4])


@pytest.mark.parametrize("token", ["w5", {"content": "w5"}])
def test_the_settings_beside_the_tokenizer_name_the_end(tmp_path, token):
    path = saved(tmp_path, eos_token=token)
    assert load_encoding(path, bos=None, eos=None).end == [6]
    assert load_encoding(f"{path}/tokenizer.json", bos=None, eos=None).end == [6]


def test_an_unknown_end_is_asked_for(tmp_path):
    from tokenizers import Tokenizer, models

    path = saved(tmp_path, Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="eos=TOKEN, or eos=none"):
        load_encoding(path, bos=None, eos=None)
    assert load_encoding(path, bos=None, eos="none").end == []
    with pytest.raises(ValueError, match="bos <s> is not in"):
        load_encoding(path, bos="<s>", eos="none")


def test_bytes_need_no_file_and_are_exact():
    text = "Größe 中 \n\t😀 don't"
    encoding = load_encoding("bytes", bos=None, eos=None)
    tokens, lengths, _ = Encoder(encoding)([text])
    assert lengths.tolist() == [len(text.encode()) + 1]
    from tokenizers import Tokenizer

    assert Tokenizer.from_str(encoding.tokenizer).decode(tokens[:-1].tolist()) == text
    assert (tokens[-1], encoding.vocab_size) == (256, 257)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{index}": index for index in range(70_000)}
    path = saved(tmp_path, Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))
    encoding = load_encoding(path, bos=None, eos="w69999")
    assert Encoder(encoding)(["w68000"])[0].tolist() == [68_000, 69_999]
    assert Encoder(encoding)(["w68000"])[0].dtype == np.uint32


def test_what_is_missing_is_named_in_a_line(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        load_encoding(str(tmp_path), bos=None, eos=None)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_encoding("./none", bos=None, eos=None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_encoding(str(tmp_path), bos=None, eos=None)
    monkeypatch.setattr(tokenizers, "getproxies", dict)
    monkeypatch.setattr(tokenizers.socket, "create_connection", Mock(side_effect=OSError(1, "no route to host")))
    began = time.monotonic()
    with pytest.raises(
        FileNotFoundError, match=r"\(no connection to huggingface.co: no route to host\)\. Give a local"
    ):
        load_encoding("nobody/nothing", bos=None, eos=None)
    assert time.monotonic() - began < 5, "without the Hub's attempts"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"Give a local tokenizer\.json"):
        load_encoding("nobody/nothing", bos=None, eos=None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        load_encoding("bytes", bos=None, eos=None)
