"""Classes by how a dry run treats their objects: shared, copied by attributes, copied by pickle, or not copied.

A placeholder replaces an object that is not copied: using it in a step raises, and names the object.
"""

import enum
import pathlib
import re
import struct
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

IMMUTABLE = frozenset(
    (
        *(bool, bytes, complex, float, int, object, property, range, slice, staticmethod, classmethod, str, type),
        *(types.NoneType, types.EllipsisType, types.NotImplementedType, types.ModuleType, types.CodeType),
        *(types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    )
)
_SHARED_BASES = (type, enum.Enum, pathlib.PurePath, re.Pattern, re.Match)
_SHARED_PACKAGES = frozenset(
    "dataclasses datetime decimal fractions inspect operator typing uuid zoneinfo".split()  # noqa: SIM905
)
_SHARED_MODULES = ("torch.distributed.", "torch.fx.", "torch._dynamo.", "torch._inductor.", "torch._functorch.")
# Files, threads, processes and connections: a copy would act on the original's.
_EXTERNAL_PACKAGES = frozenset(
    "_contextvars _ctypes _io _queue _thread _weakrefset asyncio concurrent contextvars ctypes http io mmap"  # noqa: SIM905
    " multiprocessing queue selectors signal socket sqlite3 ssl subprocess tempfile threading urllib weakref".split()
)
_PICKLED_PACKAGES = frozenset(("_random", "array", "builtins", "functools", "itertools", "numpy", "random"))
_POINTER = struct.calcsize("P")


def is_shared(kind: type) -> bool:
    """Return whether a step cannot change such an object, or it belongs to the machinery of the run."""
    if issubclass(kind, _SHARED_BASES) or hasattr(kind, "__members__"):  # also enumerations of C++
        return True
    if str(kind.__module__).startswith(_SHARED_MODULES):
        return not issubclass(kind, torch.optim.Optimizer)
    return _package(kind) in _SHARED_PACKAGES or any(
        base.__module__ == "numpy" and base.__name__ in ("generic", "dtype") for base in kind.__mro__
    )


def has_own_end(kind: type) -> bool:
    """Return whether a copy could act on the run, since it closes something or refers to files and threads."""
    return any(_package(base) in _EXTERNAL_PACKAGES or "__del__" in vars(base) for base in kind.__mro__)


def is_plain(kind: type) -> bool:
    """Return whether all state of such an object is in its attributes and slots."""
    size = object.__basicsize__ + _POINTER * len(slots_of(kind))
    size += _POINTER * ((kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))  # type: ignore[attr-defined]
    return kind.__basicsize__ == size and not kind.__itemsize__


def can_pickle(kind: type) -> bool:
    """Return whether ``__reduce_ex__`` describes such an object without side effects and at little cost."""
    return any(_package(base) in _PICKLED_PACKAGES for base in kind.__mro__ if base is not object)


def slots_of(kind: type) -> list[Any]:
    """Return the descriptors of all slots of a class and its bases."""
    return [
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if type(member) is types.MemberDescriptorType
    ]


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


class NotCopiedError(RuntimeError):
    """A step uses an object that cannot be copied. The text names the object, as a part of a sentence."""


class Uses:
    """Records whether a step used a placeholder, even if the step catches the error."""

    def __init__(self) -> None:
        self._error: NotCopiedError | None = None
        self._is_running = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if the code in this context uses a placeholder."""
        self._is_running = True
        try:
            yield
        except Exception as error:
            if self._error is not None and error is not self._error:
                raise self._error from error
            raise
        finally:
            self._is_running = False
        if self._error is not None:
            raise self._error

    def note(self, what: str) -> None:
        """Raise while a step runs. Before and after it, objects are only built and closed."""
        if self._is_running:
            self._error = self._error or NotCopiedError(what)
            raise self._error


class NotCopied:
    """A placeholder for an object that cannot be copied; using it in a step raises."""

    def __init__(self, uses: Uses, what: str) -> None:
        vars(self).update(_uses=uses, _what=what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python asks for these without using the object
            raise AttributeError(name)
        return self._use()

    def __setattr__(self, name: str, value: Any) -> None:
        self._use()

    def _use(self, *_: Any, **__: Any) -> Any:
        self._uses.note(self._what)
        return self

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _use
    __enter__ = __exit__ = __bool__ = __int__ = __float__ = __index__ = __array__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
