"""Results of trials in one folder: JSON lines, appended, so that an interrupted search repeats nothing."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ups.insight.tune.result import Result

_FILE = "results.jsonl"
_KEPT = (None, "refused")
_DAY = 24 * 3600.0


class Store:
    """Keeps results by key, in a file that several searches may append to.

    Failures other than refusals count for a day, so that a search that is continued does not repeat them: their cause
    may be gone later.

    Args:
        folder: Where the file is; it is created with the first result.
        is_fresh: Whether results that the file has are ignored.
    """

    def __init__(self, folder: Path, *, is_fresh: bool = False) -> None:
        self.path = folder / _FILE
        self._results: dict[str, Result] = {}
        if self.path.exists() and not is_fresh:
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                    key, result = str(row["key"]), Result.of(row["result"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # a line that was interrupted
                if result.failure in _KEPT or _is_of_today(row):
                    self._results[key] = result

    def find(self, key: str) -> Result | None:
        """Return the result of ``key``, or None."""
        return self._results.get(key)

    def add(self, key: str, result: Result, *, about: Mapping[str, Any]) -> None:
        """Append a result. ``about`` describes the trial for people who read the file."""
        self._results[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"key": key, "time": time.time(), **about, "result": result.as_dict()}
        # One write to a file that is opened for appending is not mixed with those of other processes.
        with self.path.open("ab", buffering=0) as file:
            before = b"" if _ends_a_line(self.path) else b"\n"
            file.write(before + json.dumps(row, default=str).encode() + b"\n")


def default_folder() -> Path:
    """Return the folder of results in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_ups", "trials")


def shape_of(module: nn.Module) -> str:
    """Return a digest of the names, shapes and dtypes of parameters and buffers; the module may be on meta."""
    values = [*module.named_parameters(), *module.named_buffers()]
    return digest([(name, None if is_lazy(value) else [*value.shape], str(value.dtype)) for name, value in values])


def digest(value: Any) -> str:
    """Return a short digest of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:20]


def digest_of_files(paths: Iterable[str | Path]) -> str:
    """Return a digest of the content of files; those that do not exist are left out."""
    found = [Path(path) for path in paths]
    return digest([path.read_text(encoding="utf-8", errors="replace") for path in found if path.is_file()])


def _is_of_today(row: Mapping[str, Any]) -> bool:
    written = row.get("time")
    return isinstance(written, float) and 0 <= time.time() - written < _DAY


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
