"""Leave out of a checkpoint's settings what the parser would import: only the user's configuration may name code."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lightning_ups._compat.lightning.trainer import class_settings
from lightning_ups.config.diagnosis import find_class
from lightning_ups.config.layers import Tree

__all__ = ["inert", "loaded_object"]

# Of these the parser makes no more than the value itself, whatever the text is.
_PLAIN = (str, int, float, bool, complex, bytes, bytearray, NoneType, Path, PurePath, os.PathLike, timedelta)
_CONTAINERS = ("builtins", "collections", "collections.abc")
_SPEC = ("class_path", "init_args", "dict_kwargs")


def inert(saved: Tree, kind: Callable[..., Any], given: Tree, *, keywords: Sequence[str] = ()) -> tuple[Tree, Tree]:
    """Return the settings in a checkpoint that name no code; and what is left out, by its place.

    A class is taken if ``given`` names the same one, and its settings if they name no code either.

    Args:
        saved: The settings of ``kind``, as YAML has them.
        kind: A class, or a function that makes an instance of one.
        given: The settings in the user's configuration.
        keywords: The settings that ``kind`` takes without naming them.
    """
    left: Tree = {}
    hints = dict.fromkeys(keywords, Any) | _hints(kind)
    return _settings(saved, hints, given, "", left), left


def loaded_object(path: str) -> Any:
    """Return the object of that path in a module that is loaded, or None: nothing is imported."""
    module, _, name = path.rpartition(".")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


class _NamesCodeError(Exception):
    pass


def _hints(kind: Callable[..., Any]) -> Tree:
    """Return the type of each setting; of those in a group, as of a dataclass, a tree of types."""
    tree: Tree = {}
    for key, hint in class_settings(kind).items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = hint
    return tree


def _settings(saved: Tree, hints: Tree, given: Any, place: str, left: Tree) -> Tree:
    kept, given = {}, given if isinstance(given, dict) else {}
    for key, value in saved.items():
        where = f"{place}{key}"
        try:
            if "." in str(key) or (key not in hints and not _is_number(value)):
                raise _NamesCodeError(_named(value))
            kept[key] = _value(value, hints.get(key), given.get(key), where, left)
        except _NamesCodeError as error:
            left[where] = error.args[0]
    return kept


def _value(value: Any, hint: Any, given: Any, place: str, left: Tree) -> Any:
    if _is_number(value):
        return value
    while get_origin(hint) is Annotated:
        hint = hint.__origin__
    if isinstance(value, dict) and not value.keys().isdisjoint(_SPEC):
        return _spec(value, hint, given, place, left)
    if isinstance(hint, dict):  # a group
        if not isinstance(value, dict):
            raise _NamesCodeError(value)
        return _settings(value, hint, given, f"{place}.", left)
    if isinstance(hint, tuple) or get_origin(hint) in (Union, UnionType):
        for each in hint if isinstance(hint, tuple) else get_args(hint):  # the parser may try them all
            value = _value(value, each, given, place, left)
        return value
    kind = get_origin(hint) or hint
    if kind is Literal or kind in _PLAIN or (isinstance(kind, type) and issubclass(kind, Enum)):
        return value
    if kind in (Any, object) or not isinstance(kind, type):  # the parser reads YAML in a text
        return _untyped(value)
    if kind.__module__ in _CONTAINERS and hasattr(kind, "__iter__"):
        return _elements(value, hint, given, place)
    is_other = isinstance(given, str) or (isinstance(given, dict) and not given.keys().isdisjoint(_SPEC))
    if is_dataclass(kind) and isinstance(value, dict) and not is_other:
        return _settings(value, _hints(kind), given, f"{place}.", left)
    raise _NamesCodeError(_named(value))


def _spec(value: Tree, hint: Any, given: Any, place: str, left: Tree) -> Tree:
    """Return the settings of a class, if the user gives the same class."""
    name = given.get("class_path") if isinstance(given, dict) else given
    saved = value.get("class_path")
    bases = [each for each in (hint, *get_args(hint)) if isinstance(each, type)]
    kind = find_class(name, bases) if isinstance(name, str) else None
    if kind is None or not isinstance(saved, str) or (saved != name and loaded_object(saved) is not kind):
        raise _NamesCodeError(_named(value))
    spec, hints = {"class_path": name}, {"init_args": _hints(kind), "dict_kwargs": None}
    for part in _SPEC[1:]:
        if isinstance(inner := value.get(part), dict):
            known = hints[part] or dict.fromkeys(inner, Any)
            within = given.get(part) if isinstance(given, dict) else None
            spec[part] = _settings(inner, known, within, f"{place}.{part}.", left)
    return spec


def _elements(value: Any, hint: Any, given: Any, place: str) -> Any:
    """Return a list or a mapping of which every element names no code; a text may be the path of such a list."""
    hints = [each for each in get_args(hint) if each is not Ellipsis]
    if isinstance(value, str):
        if not all(get_origin(each) is Literal or each in _PLAIN for each in hints):
            raise _NamesCodeError(_named(value))
        return _untyped(value)
    inner: Tree = {}
    within = given if isinstance(given, dict) else {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, element in items:
        _untyped(key)
        for each in hints or (Any,):
            _value(element, each, within.get(key), f"{place}.{key}", inner)
    if inner:  # it would not be what was saved without them
        raise _NamesCodeError(next(iter(inner.values())))
    return value


def _untyped(value: Any) -> Any:
    if isinstance(value, str) and "class_path" in value:
        raise _NamesCodeError(_named(value))
    for element in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _untyped(element)
    return value


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float)


def _named(value: Any) -> Any:
    return value.get("class_path", value) if isinstance(value, dict) else value
