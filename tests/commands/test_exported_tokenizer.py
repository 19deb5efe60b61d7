import json

import pytest

from lightning_ups.commands.exported_tokenizer import write_tokenizer
from tests.commands.test_export import with_tokens

pytest.importorskip("transformers")


def test_special_tokens_of_a_config_are_kept(tmp_path):
    output = tmp_path / "hf"
    output.mkdir()
    (output / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": None}))
    written = write_tokenizer(str(with_tokens(tmp_path)), output)
    assert output / "tokenizer.json" in written
    assert json.loads((output / "config.json").read_text()) == {"bos_token_id": 5, "eos_token_id": 256}


def test_a_written_tokenizer_can_be_written_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_tokenizer(str(with_tokens(tmp_path)), first)
    assert {file.name for file in write_tokenizer(str(first), second)} >= {"tokenizer.json", "tokenizer_config.json"}


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises((OSError, ValueError)):
        write_tokenizer(str(tmp_path), tmp_path)
