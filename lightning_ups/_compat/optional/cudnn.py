"""Keeps torch's cuDNN the only one in the process while another library looks for one.

cuDNN 9 is a thin library over parts, which are found by their bare names: whichever library loads a part first decides
for the whole process. A library that loads another release, by name or through its dependencies, breaks attention and
convolutions of torch, which looks up its functions on their first call.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

Version = tuple[int, ...]
_FIRST = ("graph", "ops")  # other parts are linked to these


@contextmanager
def torchs_cudnn_first() -> Iterator[None]:
    """Load all parts of torch's cuDNN, and point other libraries to them while the context is open."""
    folder = _folder()
    if folder is None:  # torch has none, or contains it in its own library
        yield
        return
    for part in sorted(folder.glob("libcudnn_*.so.*"), key=_rank):
        with suppress(OSError):  # a part that is not usable here; code that needs it raises
            ctypes.CDLL(str(part))
    with suppress(RuntimeError):  # `cudnn_conflict` reports it
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
    """Return the conflicting releases of cuDNN in this process and their paths, or None."""
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
    """Return the release whose functions take precedence over torch's own, or None."""
    with suppress(AttributeError, OSError):
        function = ctypes.CDLL(None).cudnnGetVersion
        function.restype = ctypes.c_size_t
        return _parts_of(int(function()))
    return None


def _parts_of(encoded: int) -> Version:
    major, rest = divmod(encoded, 10_000 if encoded >= 90_000 else 1_000)
    return major, rest // 100, rest % 100


def _folder() -> Path | None:
    """Return the folder of the cuDNN that is loaded with torch: its own, unless another was loaded before."""
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
