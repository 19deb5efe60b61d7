"""Tokenizers, and the tokens of documents as arrays."""

import hashlib
import importlib
import itertools
import json
import socket
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")  # of known tokenizers
_CALL = 2**20  # characters in one call of the tokenizer
Array = np.ndarray[Any, Any]


class Encoding(NamedTuple):
    """How documents become tokens.

    Args:
        tokenizer: The content of ``tokenizer.json``.
        begin: Tokens at the beginning of each document.
        end: Tokens at its end.
        vocab_size: Tokens are below this number.
    """

    tokenizer: str
    begin: list[int]
    end: list[int]
    vocab_size: int

    @property
    def dtype(self) -> str:
        """The smallest type that has all tokens."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def digest(self) -> str:
        """The hash of the tokenizer."""
        return hashlib.sha256(self.tokenizer.encode()).hexdigest()[:16]


def load_encoding(name: str, *, bos: str | None, eos: str | None) -> Encoding:
    """Return the encoding of a tokenizer.

    Args:
        name: ``bytes``, a ``tokenizer.json``, a folder with one, or a name on the Hugging Face Hub.
        bos: The token that begins a document; ``none``; None: what the tokenizer itself adds.
        eos: The token that ends a document; ``none``; None: what the tokenizer itself adds, else its end-of-text token.

    Raises:
        FileNotFoundError: If there is no such tokenizer.
        ImportError: If the package `tokenizers` is missing.
        ValueError: If a token is not in the vocabulary, or the end token is not known.
    """
    library = _library()
    if name == "bytes":
        tokenizer, known_eos = _of_bytes(), _ENDS[0]
    else:
        file, known_eos = _find(name)
        try:
            tokenizer = library.Tokenizer.from_file(file)
        except Exception as error:  # noqa: BLE001  (tokenizers raises Exception itself)
            raise ValueError(f"tokenizer {name}: {file} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added_begin, added_end = _added(tokenizer)
    begin = added_begin if bos is None else _token(vocabulary, bos, "bos")
    if eos is not None:
        end = _token(vocabulary, eos, "eos")
    elif added_end:
        end = added_end
    else:
        known = next((each for each in (known_eos, *_ENDS) if each in vocabulary), None)
        if known is None:
            raise ValueError(
                f"tokenizer {name} does not say which token ends a document. Name it: eos=TOKEN, or eos=none."
            )
        end = [vocabulary[known]]
    return Encoding(tokenizer.to_str(), begin, end, max(vocabulary.values()) + 1)


class Encoder:
    """Encodes documents. It can be pickled."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __call__(self, texts: Iterable[str]) -> tuple[Array, Array, Array]:
        """Return the tokens of all documents, the number of tokens of each, and the hash of its text."""
        begin, end, dtype = self._encoding.begin, self._encoding.end, self._encoding.dtype
        pieces: list[Array] = []
        lengths: list[int] = []
        hashes: list[bytes] = []
        for some in _batched(texts):
            ids = [
                begin + encoded.ids + end
                for encoded in self.tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ]
            lengths += map(len, ids)
            pieces.append(np.fromiter(itertools.chain.from_iterable(ids), dtype, sum(map(len, ids))))
            hashes += (content_hash(text.encode()) for text in some)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype)
        return tokens, np.array(lengths, np.uint32), np.frombuffer(b"".join(hashes), "<u8")

    def one(self, text: str) -> Array:
        """Return the tokens of one document, by this thread alone: a process may fork afterwards."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*self._encoding.begin, *ids, *self._encoding.end], self._encoding.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return _library().Tokenizer.from_str(self._encoding.tokenizer)

    def __reduce__(self) -> tuple[type["Encoder"], tuple[Encoding]]:
        return type(self), (self._encoding,)


def content_hash(content: bytes) -> bytes:
    """Return 8 bytes that decide whether a document is for validation; the first is the lowest."""
    return hashlib.blake2b(content, digest_size=8).digest()


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _CALL:
            yield some
            some, size = [], 0
    if some:
        yield some


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ImportError("Tokenizing needs the package tokenizers: pip install tokenizers.") from None


def _of_bytes() -> Any:
    """Return a tokenizer whose tokens are bytes, and one that ends a document."""
    library = _library()
    models, pre_tokenizers = library.models, library.pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = library.Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([_ENDS[0]])
    return tokenizer


def _find(name: str) -> tuple[str, str | None]:
    """Return the file of a tokenizer, and its end-of-text token if the settings beside the file name one."""
    path = Path(name)
    if path.is_file():
        return name, _eos_of(path.with_name("tokenizer_config.json"))
    if path.is_dir():
        if not (path / "tokenizer.json").exists():
            raise FileNotFoundError(
                f"tokenizer {name} has no tokenizer.json. Write one:"
                " AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers."
            )
        return str(path / "tokenizer.json"), _eos_of(path / "tokenizer_config.json")
    if path.suffix == ".json" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"tokenizer {name} does not exist (looked up from {Path.cwd()}).")
    unreached = ""
    try:
        from huggingface_hub import constants, hf_hub_download

        unreached = _unreached(constants.ENDPOINT)
        file = hf_hub_download(name, "tokenizer.json", local_files_only=bool(unreached))
    except Exception as error:  # noqa: BLE001  (whatever the network, the Hub or the package raise)
        reason = str(error).strip().partition("\n")[0]
        why = unreached or f"{type(error).__name__}: {shorten(reason, 150, placeholder=' ...')}"
        raise FileNotFoundError(
            f"tokenizer {name} is not a local file, and the Hugging Face Hub does not give it"
            f" ({why}). Give a local tokenizer.json or a folder with one, or `bytes`."
        ) from None
    try:
        return file, _eos_of(Path(hf_hub_download(name, "tokenizer_config.json", local_files_only=bool(unreached))))
    except Exception:  # noqa: BLE001  (many tokenizers have none)
        return file, None


def _unreached(address: str) -> str:
    """Return why no connection can be made to ``address``; empty if one can. The Hub's client would try for long."""
    if getproxies():
        return ""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), timeout=5).close()
    except OSError as error:
        return f"no connection to {parts.hostname}: {error.strerror or error}"
    return ""


def _eos_of(config: Path) -> str | None:
    if not config.exists():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer itself puts before and behind a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a").ids
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start], ids[start + len(plain) :]
    return [], []


def _token(vocabulary: dict[str, int], token: str, option: str) -> list[int]:
    if token == "none":
        return []
    if token not in vocabulary:
        raise ValueError(f"{option} {token} is not in the tokenizer's vocabulary.")
    return [vocabulary[token]]
