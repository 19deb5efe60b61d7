"""Find the classes that a configuration names."""

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

_PUBLIC_ROOMS = ("callbacks", "data", "models", "precision", "strategies")
_PLAIN = (int, float, complex, str, bool, bytes, list, tuple, dict, set, frozenset, NoneType, object, type, Tensor)


def find_class(name: str, bases: Sequence[type]) -> type | None:
    """Return the class called `name` in YAML: an import path, or the bare name of a subclass of `bases`."""
    module, _, attribute = name.rpartition(".")
    if not module:
        # The bases first: Lightning's ReduceLROnPlateau has the same name as torch's.
        return next((kind for kind in (*bases, *subclasses(bases)) if kind.__name__ == name), None)
    if not all(module.split(".")):
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise  # found, but it imports another module that is not there
    return found if inspect.isclass(found) else None


def class_name(item: Any) -> str:
    """Return the bare name of the class that an item of a list names."""
    path = item.get("class_path", "") if isinstance(item, dict) else item
    return str(path).rpartition(".")[2]


def subclasses(bases: Sequence[type]) -> Iterator[type]:
    """Yield `bases` and all their subclasses."""
    for base in bases:
        yield base
        yield from subclasses(type.__subclasses__(base))


def is_public(path: str) -> bool:
    """Return whether `help` and suggestions may offer the class at `path`: of this package, only exported ones."""
    package, _, rest = path.partition(".")
    room, _, name = rest.rpartition(".")
    room = room.partition(".")[0]
    if package != "lightning_ups":
        return True
    return (room in _PUBLIC_ROOMS or not room) and name in sys.modules[f"{package}.{room}".rstrip(".")].__all__


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type hint."""
    if isinstance(hint, tuple):  # jsonargparse: any of these
        return hint
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def classes_of(hint: Any) -> list[type]:
    """Return the classes in a type hint whose instances are given by ``class_path``."""
    if isinstance(hint, tuple):
        return [kind for each in hint for kind in classes_of(each)]
    if get_args(hint) and get_origin(hint) is not Literal:
        return list(dict.fromkeys(kind for each in get_args(hint) for kind in classes_of(each)))
    if not isinstance(hint, type) or hint in _PLAIN or issubclass(hint, Enum):
        return []
    return [] if hasattr(hint, "__fspath__") or is_dataclass(hint) else [hint]
