"""Write the tokenizer of a run beside its exported weights."""

import json
from pathlib import Path
from typing import Any

from lightning_ups._compat.optional.packages import require
from lightning_ups.data.token_folder import INFO, TOKENIZER


def write_tokenizer(name: str, output: Path) -> list[Path]:
    """Write a tokenizer for ``AutoTokenizer``, and give ``config.json`` the ids of special tokens that it lacks.

    Args:
        name: A folder of tokens, a folder with a tokenizer of transformers, or a name on the Hugging Face Hub.
        output: The folder of the weights.

    Returns:
        The files that were written.

    Raises:
        OSError: If there is no such tokenizer.
        ValueError: If its files are not a tokenizer.
        ImportError: If transformers is missing.
    """
    transformers: Any = require("transformers", requirement="transformers", extra="hf", feature="A tokenizer")
    if (info := Path(name) / INFO).is_file():
        tokenizers: Any = require("tokenizers", requirement="tokenizers", extra="hf", feature="A tokenizer")
        given, facts = tokenizers.Tokenizer.from_file(str(info.with_name(TOKENIZER))), json.loads(info.read_text())
        places = {"bos_token": facts["begin"], "eos_token": facts["end"]}
        special = {place: given.id_to_token(tokens[0]) for place, tokens in places.items() if len(tokens) == 1}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=given, **special)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if (file := output / "config.json").is_file():
        config = json.loads(file.read_text())
        for place in ("bos_token_id", "eos_token_id"):
            if config.get(place) is None:
                config[place] = getattr(tokenizer, place)
        file.write_text(json.dumps(config, indent=2) + "\n")
    before = {*output.iterdir()}
    tokenizer.save_pretrained(output)
    return sorted({*output.iterdir()} - before)
