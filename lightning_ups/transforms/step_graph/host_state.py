"""What a step does on the host, which a replay does not repeat."""

import random
import sys
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ups._compat.torch.tensors.autograd import operators_seen_by
from lightning_ups.transforms.quoted import first_line

_NUMBERS = (bool, int, float, str)
_INSTALLED = {"site-packages", "dist-packages"}
_PACKAGE, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent


class HostState:
    """The attributes of modules and the random state of the host, before a step is captured.

    Args:
        module: The module and all its submodules are looked at.
        device: The device of the step.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._attributes, self._random = self._read(), self._read_random()

    def changes(self) -> list[str]:
        """Return what the step has changed since, by name."""
        found = [
            name
            for name, value in self._read().items()
            if (before := self._attributes.get(name, value)) is not value
            and (isinstance(value, Tensor) or type(before) is not type(value) or before != value)
        ]
        drawn = [name for name, state in self._read_random().items() if state != self._random.get(name, state)]
        return [*found, *drawn]

    def _read(self) -> dict[str, Any]:
        return {
            f"{name}.{key}".removeprefix("."): len(value) if isinstance(value, (list, dict)) else value
            for name, module in self._module.named_modules()
            for key, value in (*vars(module).items(), *module._buffers.items())
            if not key.startswith("_") and isinstance(value, (Tensor, list, dict, *_NUMBERS))
        }

    def _read_random(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random numbers of Python": random.getstate()}
        if (numpy := sys.modules.get("numpy")) is not None:
            states["random numbers of numpy"] = str(numpy.random.get_state(legacy=False))
        if self._device.type != "cpu":
            states["random numbers of torch on the CPU"] = torch.get_rng_state().tolist()
        return states


class ConstantIndex(int):
    """The index of a batch, for a step that is captured.

    Raises:
        RuntimeError: If it is read.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError("batch_idx is a constant in a captured step")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __float__ = __int__ = _refuse  # pyright: ignore[reportAssignmentType]
    __str__ = __repr__ = __format__ = _refuse  # pyright: ignore[reportAssignmentType]
    __hash__ = int.__hash__


def names_read(owner: Any, method: str, names: Iterable[str]) -> list[str]:
    """Return which of ``names`` the code of ``method`` reads as attributes, with the methods of ``owner`` it names."""
    todo, seen = [method], set[str]()
    found: set[str] = set()
    while todo:
        name = todo.pop()
        code = getattr(getattr(getattr(owner, name, None), "__func__", None), "__code__", None)
        if name in seen or code is None or _is_installed(code.co_filename):
            continue
        seen.add(name)
        found.update(code.co_names)
        todo.extend(code.co_names)
    return [name for name in names if name in found]


def line_of(error: BaseException) -> str:
    """Return the last line of the user's code in the traceback of ``error``, and that of a library that it called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_torch_or_ours(frame.filename)]
    own = [frame for frame in frames if not _is_installed(frame.filename)][-1:]
    called = [frame for frame in frames[-1:] if frame not in own]
    places = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in (*own, *called)]
    return ": ".join([*places, first_line(error)])


def _is_torch_or_ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) or path.is_relative_to(_TORCH) or not path.is_file()


def _is_installed(filename: str) -> bool:
    path = Path(filename)
    return not path.is_file() or bool(_INSTALLED & {*path.parts}) or path.is_relative_to(_PACKAGE)


def refusing_reads() -> AbstractContextManager[Any]:
    """Return a context in which reading the value of a tensor raises an error, as a capture on a GPU does."""

    def see(operator: Any, _: Any) -> None:
        if operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")

    return operators_seen_by(see, writes=lambda _: None)
