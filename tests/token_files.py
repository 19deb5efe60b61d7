"""Small tokenizers, documents and folders of tokens, made on the spot."""

import json

import numpy as np

from lightning_ups.data.token_folder import TokenWriter

WORDS = ["<eos>", *(f"w{index}" for index in range(60))]


def tokenizer():
    """A tokenizer of words between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def token_folder(path, documents, *, name="words"):
    """Write a folder of these lists of tokens."""
    lengths = np.array([len(document) for document in documents], np.uint32)
    hashes = np.random.default_rng(len(documents)).integers(0, 2**64, len(documents), dtype=np.uint64)
    writer = TokenWriter(path, recipe={"tokenizer": name, "source": ["toy"]}, dtype="uint16")
    writer.append(np.array([token for document in documents for token in document], np.uint16), lengths, hashes)
    writer.finish(tokenizer=tokenizer().to_str(), vocab_size=len(WORDS), begin=[], end=[0], tokenizer_name="words")
    return str(path)


def random_documents(count, *, seed=0, longest=60, first=1, last=60):
    random = np.random.default_rng(seed)
    return [random.integers(first, last, random.integers(1, longest)).tolist() for _ in range(count)]


def numbered_documents(count, *, length=9):
    """Return documents of which each token is found once."""
    return [[*range(start, start + length)] for start in range(0, count * length, length)]


def jsonl(path, texts, **more):
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts), encoding="utf-8")
    return str(path)
