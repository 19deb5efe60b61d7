"""A folder of tokens: memory-mapped files with the boundaries of documents, and a writer that can be interrupted."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

INFO, TOKENIZER, PROGRESS = "tokens.json", "tokenizer.json", "progress.json"
_TOKENS, _LENGTHS, _HASHES = "tokens.bin", "lengths.bin", "hashes.bin"
_FORMAT = 1


class TokenFolder:
    """Tokens of many documents, as ``python -m lightning_ups tokenize`` writes them.

    ``tokens.bin`` has the tokens of all documents in order, uint16 or uint32; ``lengths.bin`` the number of tokens of
    each document, uint32; ``hashes.bin`` the hash of each document's text, uint64; all in little-endian order. Of
    chats, tokens are int32, and one that is not to be learned is stored as its complement, which is negative.
    ``tokens.json`` says what made them, and ``tokenizer.json`` is the tokenizer.

    Files are mapped when they are first read. A pickled folder is its path, so that a worker maps them itself.

    Raises:
        FileNotFoundError: If the folder has no tokens, or tokenizing it was interrupted.
        ValueError: If the sizes of its files do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.info: dict[str, Any] = json.loads((self.path / INFO).read_text())
        except OSError:
            interrupted = (self.path / PROGRESS).exists()
            raise FileNotFoundError(
                f"{self.path} is not complete: tokenizing it was interrupted. Run the same tokenize command again."
                if interrupted
                else f"{self.path} is not a folder of tokens: it has no {INFO}."
                " Create one by `python -m lightning_ups tokenize`."
            ) from None
        documents, tokens = self.info["documents"], self.info["tokens"]
        width = self.dtype.itemsize
        for name, size in ((_TOKENS, tokens * width), (_LENGTHS, documents * 4), (_HASHES, documents * 8)):
            found = (self.path / name).stat().st_size
            if self.info["format"] != _FORMAT or found != size:
                raise ValueError(
                    f"{self.path / name} has {found} bytes, and {INFO} describes {size}. The copy of the folder is not"
                    " complete, or another version wrote it. Copy or tokenize it again."
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token in the file."""
        return np.dtype(self.info["dtype"]).newbyteorder("<")

    @property
    def vocab_size(self) -> int:
        """Tokens are below this number."""
        return self.info["vocab_size"]

    @cached_property
    def tokens(self) -> np.ndarray[Any, Any]:
        """All tokens, mapped."""
        return self._map(_TOKENS, self.dtype)

    @cached_property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The number of tokens of each document, int64."""
        return self._map(_LENGTHS, np.dtype("<u4")).astype(np.int64)

    @cached_property
    def starts(self) -> np.ndarray[Any, Any]:
        """The position in ``tokens`` of each document's first token, int64."""
        return np.cumsum(self.lengths) - self.lengths

    def held_out(self, fraction: float) -> np.ndarray[Any, Any]:
        """Return for each document whether it is among this fraction, by the hash of its text.

        A document stays on its side when others are added, and so does a copy of it in another folder.
        """
        return self._map(_HASHES, np.dtype("<u8")) < np.float64(fraction) * 2.0**64

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer` that made the tokens."""
        return importlib.import_module("tokenizers").Tokenizer.from_file(str(self.path / TOKENIZER))

    def __reduce__(self) -> tuple[type["TokenFolder"], tuple[Path]]:
        return type(self), (self.path,)

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if not (self.path / name).stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(self.path / name, dtype=dtype, mode="r"))


class TokenWriter:
    """Writes a `TokenFolder`, and continues where an interrupted one stopped, so that the files have the same bytes.

    Args:
        path: The folder.
        recipe: What makes the tokens. Only a writer with the same recipe may continue.
        dtype: ``uint16`` or ``uint32``.

    Attributes:
        done: The number of parts that are in the files.
        info: The content of ``tokens.json`` if the folder is complete, else None.

    Raises:
        ValueError: If the folder has tokens of another recipe, or other files.
    """

    def __init__(self, path: str | Path, *, recipe: Mapping[str, Any], dtype: str) -> None:
        self.path, self._recipe, self._dtype = Path(path), dict(recipe), np.dtype(dtype).newbyteorder("<")
        self.path.mkdir(parents=True, exist_ok=True)
        found = next((p for name in (INFO, PROGRESS) if (p := self._read(name)) is not None), None)
        if found is None and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path} has files that tokenize did not write. Give --output an empty or new folder."
            )
        if found is not None and (before := found["recipe"]) != self._recipe:
            names = sorted(name for name in {*before, *self._recipe} if before.get(name) != self._recipe.get(name))
            changed = "; ".join(
                f"{name} {_short(before.get(name))} -> {_short(self._recipe.get(name))}" for name in names
            )
            raise ValueError(
                f"{self.path} has tokens of other settings ({changed}). Use the same settings, another --output, or"
                " delete the folder."
            )
        self.info = self._read(INFO)
        self._sizes: dict[str, int] = dict.fromkeys((_TOKENS, _LENGTHS, _HASHES), 0)
        self.done = 0
        if found is not None and self.info is None:
            self.done, self._sizes = found["done"], found["sizes"]
        self._files: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._sizes[_TOKENS] // self._dtype.itemsize

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return self._sizes[_LENGTHS] // 4

    def append(self, tokens: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], hashes: np.ndarray[Any, Any]) -> None:
        """Append the documents of the next part."""
        if not self._files:
            self._open()
        content = {
            _TOKENS: tokens.astype(self._dtype, copy=False),
            _LENGTHS: lengths.astype("<u4", copy=False),
            _HASHES: hashes.astype("<u8", copy=False),
        }
        for name, array in content.items():
            self._files[name].write(array.data.cast("B") if array.size else b"")
            self._sizes[name] += array.nbytes
        self.done += 1

    def discard(self) -> None:
        """Remove all files, so that a writer with another recipe may begin."""
        self.close()
        for path in self.path.iterdir():
            path.unlink()

    def commit(self) -> None:
        """Make what was appended permanent: an interrupted writer continues after it."""
        if not self._files:
            self._open()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._write(PROGRESS, {"recipe": self._recipe, "done": self.done, "sizes": self._sizes})

    def finish(self, *, tokenizer: str, **more: Any) -> dict[str, Any]:
        """Complete the folder and return the content of ``tokens.json``; ``more`` is written into it."""
        self.commit()
        self.close()
        (self.path / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        self.info = {
            "format": _FORMAT,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "dtype": self._dtype.name,
            **more,
            "recipe": self._recipe,
        }
        self._write(INFO, self.info)
        (self.path / PROGRESS).unlink()
        return self.info

    def close(self) -> None:
        """Close the files; what was not committed is overwritten by the next writer."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _open(self) -> None:
        for name, size in self._sizes.items():
            path = self.path / name
            if size and (not path.exists() or path.stat().st_size < size):
                raise ValueError(f"{path} is shorter than when it was written. Delete the folder {self.path}.")
            file = self._files[name] = path.open("r+b" if path.exists() else "w+b")
            file.truncate(size)
            file.seek(size)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text()) if path.exists() else None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(self.path / name)  # a reader sees the old file or the new one


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
