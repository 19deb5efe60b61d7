"""The compiler's caches as one file, so that a second start need not make again what is in it.

The file is a line of JSON that says for what it is good, and then what ``torch.compiler.save_cache_artifacts`` gives.
It holds programs that will be run: load one only from where you would load code.
"""

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_ups._compat.torch.compile import dynamo

_FORMAT = "lightning_ups compile cache 1"


class CacheFile:
    """A file of compiled programs for one device.

    A file that cannot be used, since it was made elsewhere or is damaged, is never replaced.

    Args:
        path: Where it lies. A program is made for a device by its number: those for the second device of a machine
            lie beside this file, under its name and ``.1``, and so on.
        device: For what device.
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device) -> None:
        path = Path(path)
        self.path = path.with_name(f"{path.name}.{device.index}") if device.index else path
        self._good_for = {"format": _FORMAT, **dynamo.toolchain(), "device": _device(device)}
        self._in_file: set[tuple[str, str]] = set()
        self._usable = True

    def load(self) -> int:
        """Give the compiler what the file has, and return how much that is: nothing, if there is no file.

        Raises:
            ValueError: If the file is not usable here.
        """
        self._usable = False
        try:
            header, _, programs = self.path.read_bytes().partition(b"\n")
            problem = self._mismatch(header, programs)
            loaded = None if problem else dynamo.load_artifacts(programs)
        except FileNotFoundError:
            self._usable = True
            return 0
        except OSError as error:
            loaded, problem = None, f"reading it failed: {error}"
        if loaded is None:
            raise ValueError(
                f"The compile cache {self.path} is not used: {problem or 'torch does not understand it'}."
                " What it holds are programs for one kind of device and one version of torch. It stays as it is;"
                " delete it, or give another path, to have a new one written."
            )
        self._in_file, self._usable = loaded, True
        return len(loaded)

    def save(self) -> int:
        """Write all that was loaded or compiled, if any of it is new, and return how much is in the file.

        Raises:
            OSError: If it cannot be written.
        """
        if self._usable and dynamo.has_new_artifacts() and (saved := torch.compiler.save_cache_artifacts()):
            programs, keys = saved[0], dynamo.artifact_keys(saved[1])
            if not keys <= self._in_file:
                header = json.dumps({**self._good_for, "sha256": hashlib.sha256(programs).hexdigest()})
                _replace(self.path, header.encode() + b"\n" + programs)
                self._in_file = keys
        return len(self._in_file)

    def _mismatch(self, header: bytes, programs: bytes) -> str | None:
        try:
            facts: Any = json.loads(header)
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
            return "it is not a file that Compile wrote"
        for key, value in self._good_for.items():
            if facts.get(key) != value:
                return f"it was made for {key} {facts.get(key)}, and here it is {value}"
        return None if facts.get("sha256") == hashlib.sha256(programs).hexdigest() else "it is damaged"


def _replace(path: Path, content: bytes) -> None:
    # Written beside it and renamed: a reader, or a crash, never meets half a file.
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type}, {torch.get_device_module(device).get_device_name(device)}"
