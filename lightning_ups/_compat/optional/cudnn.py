"""cuDNN, of which a process can have one: that of torch stays it while another library looks for one.

cuDNN 9 is a thin library over parts, which are found by their bare names: whoever loads a part first decides for all
of the process. A library that loads another release for everybody, by name or among what it is linked to, so breaks
attention and convolutions of torch, which finds its functions there on their first call.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["cudnn_conflict", "torchs_cudnn_first"]

Version = tuple[int, ...]
_FIRST = ("graph", "ops")  # what other parts are linked to


@contextmanager
def torchs_cudnn_first() -> Iterator[None]:
    """Load all of the cuDNN that torch is linked to, and point there whoever looks for one as long as this is open."""
    folder = _folder()
    if folder is None:  # torch has none, or has it within its own library
        yield
        return
    for part in sorted(folder.glob("libcudnn_*.so.*"), key=_rank):
        with suppress(OSError):  # one that is of no use here; what lacks it will say so
            ctypes.CDLL(str(part))
    with suppress(RuntimeError):  # `cudnn_conflict` tells of it
        torch.backends.cudnn.version()
    before = os.environ.get("CUDNN_HOME")
    os.environ["CUDNN_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDNN_HOME"]
        else:
            os.environ["CUDNN_HOME"] = before


def cudnn_conflict() -> str | None:
    """Return which releases of cuDNN torch would run with, and from where, if they do not go together; or None."""
    bindings: Any = getattr(torch._C, "_cudnn", None)
    if bindings is None or not bindings.is_cuda or os.environ.get("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK") == "1":
        return None
    compiled = tuple(bindings.getCompileVersion())
    found = {version for version in (tuple(bindings.getRuntimeVersion()), _version_for_all()) if version is not None}
    if len(found) == 1 and all(v[0] == compiled[0] and v[1] >= compiled[1] for v in found):
        return None
    places = ", ".join(sorted({str(path.parent) for path in _loaded()})) or "an unknown folder"
    wanted, *others = (".".join(map(str, version)) for version in (compiled, *sorted(found)))
    verb = "is" if len(others) == 1 else "are"
    return f"torch was compiled against cuDNN {wanted}, and {' and '.join(others)} {verb} loaded, from {places}"


def _version_for_all() -> Version | None:
    """Return the release whose functions stand before those of torch's own, if any does: a first call goes there."""
    with suppress(AttributeError, OSError):
        function = ctypes.CDLL(None).cudnnGetVersion
        function.restype = ctypes.c_size_t
        return _parts_of(int(function()))
    return None


def _parts_of(encoded: int) -> Version:
    major, rest = divmod(encoded, 10_000 if encoded >= 90_000 else 1_000)
    return major, rest // 100, rest % 100


def _folder() -> Path | None:
    """Return the folder of the cuDNN that is loaded with torch: its own, if nobody was before it."""
    return next((path.parent for path in _loaded() if path.name.startswith("libcudnn.so")), None)


def _loaded() -> list[Path]:
    """Return the files of cuDNN that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libcudnn" in line)
    return [Path(path) for path in dict.fromkeys(paths)]


def _rank(part: Path) -> tuple[bool, str]:
    return not any(part.name.startswith(f"libcudnn_{name}.") for name in _FIRST), part.name
