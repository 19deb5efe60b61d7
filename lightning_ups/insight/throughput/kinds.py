"""Classes of objects: which a step may share with the run, and of which it can have a copy."""

import enum
import pathlib
import re
import struct
import types
from typing import Any

import torch

__all__ = ["INERT", "is_plain", "is_rebuilt", "is_refused", "is_shared", "slots_of"]

# Nothing that a step does changes one of these.
INERT = frozenset(
    (
        *(bool, bytes, complex, float, int, object, property, range, slice, staticmethod, classmethod, str, type),
        *(types.NoneType, types.EllipsisType, types.NotImplementedType, types.ModuleType, types.CodeType),
        *(types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    )
)
_SHARED_BASES = (type, enum.Enum, pathlib.PurePath, re.Pattern, re.Match)
_SHARED_ROOTS = frozenset(
    ("dataclasses", "datetime", "decimal", "fractions", "inspect", "operator", "typing", "uuid", "zoneinfo")
)
_SHARED_PARTS = ("torch.distributed.", "torch.fx.", "torch._dynamo.", "torch._inductor.", "torch._functorch.")
# They act outside of the step, or wait for others who do.
_REFUSED_ROOTS = frozenset(
    (
        *("_contextvars", "_ctypes", "_io", "_queue", "_thread", "_weakrefset", "asyncio", "concurrent", "contextvars"),
        *(
            "ctypes",
            "http",
            "io",
            "mmap",
            "multiprocessing",
            "queue",
            "selectors",
            "signal",
            "socket",
            "sqlite3",
            "ssl",
        ),
        *("subprocess", "tempfile", "threading", "urllib", "weakref"),
    )
)
_REBUILT_ROOTS = frozenset(("_random", "array", "builtins", "itertools", "numpy", "random"))
_POINTER = struct.calcsize("P")


def is_shared(kind: type) -> bool:
    """Return whether the step may have the run's own, which it cannot change, or which is the machinery of the run."""
    if issubclass(kind, _SHARED_BASES) or hasattr(kind, "__members__"):  # also enumerations of C++
        return True
    module = str(kind.__module__)
    if module.startswith(_SHARED_PARTS):
        return not issubclass(kind, torch.optim.Optimizer)
    return _root(kind) in _SHARED_ROOTS or any(
        base.__module__ == "numpy" and base.__name__ in ("generic", "dtype") for base in kind.__mro__
    )


def is_refused(kind: type) -> bool:
    """Return whether a copy would act on the run: it has an end of its own, or to do with files and threads."""
    return any(_root(base) in _REFUSED_ROOTS or "__del__" in vars(base) for base in kind.__mro__)


def is_plain(kind: type) -> bool:
    """Return whether all that such an object knows is in its attributes and slots."""
    size = object.__basicsize__ + _POINTER * len(slots_of(kind))
    size += _POINTER * ((kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))  # type: ignore[attr-defined]
    return kind.__basicsize__ == size and not kind.__itemsize__


def is_rebuilt(kind: type) -> bool:
    """Return whether ``__reduce_ex__`` says how to make such an object again, touching nothing and cheaply."""
    return any(_root(base) in _REBUILT_ROOTS for base in kind.__mro__ if base is not object)


def slots_of(kind: type) -> list[Any]:
    """Return the descriptors of the slots of a class, those of its bases too."""
    return [
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if type(member) is types.MemberDescriptorType
    ]


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]
