"""Take settings of the model from a checkpoint, below everything that the user gives.

A checkpoint gives plain values only: what the parser would import, only the user's configuration may name.
"""

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import reduce
from pathlib import Path, PurePath
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from lightning_ups._compat.lightning.trainer import class_settings
from lightning_ups.config.classes import find_class, members
from lightning_ups.config.layers import Layer, Tree, section
from lightning_ups.state.checkpoint import is_complete, rest_of

_SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")
# The parser imports nothing for a text of these types.
_PLAIN = (str, int, float, bool, complex, bytes, bytearray, NoneType, Path, PurePath, os.PathLike, timedelta)
_CONTAINERS = ("builtins", "collections", "collections.abc")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """The settings of the model in a checkpoint."""

    path: Path
    tree: Tree  # the section ``model`` that it gives: plain values that the user does not give
    saved: Tree  # all its settings
    left_out: Mapping[str, str]  # settings that are not taken, and what the checkpoint has there

    @property
    def layer(self) -> Layer:
        """The settings as a layer."""
        return Layer(name=f"the checkpoint {self.path}", tree={"model": self.tree})

    def notes(self) -> Iterator[str]:
        """Yield a line for each setting that is left out."""
        why = "a checkpoint never names code to import. Give it, unless you want its default."
        for key, value in self.left_out.items():
            yield f"model.{key} is not taken from {self.path}, which has {value:.80}: {why}"

    def differences(self, final: Tree, given: Tree) -> Iterator[str]:
        """Yield a line for each setting in `final` that the user gave and that differs from the checkpoint."""
        for name, mine, theirs in _differences(final, self.saved):
            if name.partition(".")[0] in {key.removesuffix("+") for key in given}:
                yield f"model.{name} is {mine!r}, as given; the checkpoint has {theirs!r}."


def read_settings(
    path: Path, kind: type, *, name: str | None, given: Tree, linked: Collection[str] = ()
) -> CheckpointSettings | None:
    """Return the settings in the checkpoint at `path`, or None if it is not complete or of another class.

    Args:
        path: A file or a folder.
        kind: The class of the model.
        name: How the user calls the class. None: the program has fixed it.
        given: The settings that the user gives. They are not taken.
        linked: Settings that come from another object. They are not taken either.
    """
    if not path.exists() or not is_complete(path):
        return None
    rest, unread = rest_of(path)
    saved = rest.get("hyper_parameters")
    if not isinstance(saved, Mapping):
        return None
    saved_class = saved.get("_class_path")
    if saved_class and name and saved_class != name and _loaded_object(str(saved_class)) is not kind:
        return None
    types, plain = nested_types(kind), dict[str, Any]()
    left_out = {key: of for place, of in unread.items() if (key := place.removeprefix("hyper_parameters.")) in types}
    for key in saved:
        if key not in types or key in {*linked, *left_out}:
            continue
        try:
            plain[key] = _plain(saved[key])
        except TypeError as error:
            left_out[key] = str(error)
    left_out = {key: f"a {of}" for key, of in left_out.items() if key not in given}
    tree, with_imports = without_imports(plain, types, given)
    left_out |= {key: repr(value) for key, value in with_imports.items()}
    if name is not None:
        tree = {"class_path": name, "init_args": tree}
    return CheckpointSettings(path=path, tree=tree, saved=plain, left_out=left_out)


def without_imports(saved: Tree, types: Tree, given: Tree, place: str = "") -> tuple[Tree, Tree]:
    """Return the settings for which the parser imports nothing, and those that are left out.

    A class is taken if the user names the same one. Names of what is left out begin with `place`.
    """
    taken: Tree = {}
    left_out: Tree = {}
    for key, value in saved.items():
        hint, mine, where = types.get(key), given.get(key), f"{place}{key}"
        if isinstance(hint, dict) and isinstance(value, dict):
            taken[key], left = without_imports(value, hint, section(given, key), f"{where}.")
            left_out |= left
        elif spec := _same_class(value, mine, hint):
            saved_args, given_args = section(value, "init_args"), section(mine, "init_args")
            inner, left = without_imports(saved_args, nested_types(spec[1]), given_args, f"{where}.init_args.")
            taken[key] = {"class_path": spec[0], "init_args": inner}
            left_out |= left
        elif key in given:
            continue
        elif key in types and _imports_nothing(value, hint):
            taken[key] = value
        else:
            left_out[where] = value.get("class_path", value) if isinstance(value, dict) else value
    return taken, left_out


def settings_of_model(layers: Sequence[Layer]) -> Tree:
    """Return the settings of the model that `layers` give, the strongest last, without ``class_path``."""
    return reduce(_over, (flat(section(layer.tree, "model")) for layer in layers), {})


def flat(model: Tree) -> Tree:
    """Return the settings in a section ``model``, with or without ``class_path``."""
    own = {key: value for key, value in model.items() if key not in _SPEC_KEYS}
    return own | section(model, "init_args")


def _loaded_object(path: str) -> Any:
    """Return the object at `path` if its module is loaded; nothing is imported."""
    module, _, name = path.rpartition(".")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def nested_types(kind: type) -> Tree:
    """Return the type of each setting of `kind`; for a group, such as a dataclass, a tree of types."""
    tree: Tree = {}
    for key, hint in class_settings(kind).items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = hint
    return tree


def _plain(value: Any) -> Any:
    """Return `value` as YAML would have it. A TypeError names the type of what YAML has no form for."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _same_class(saved: Any, given: Any, hint: Any) -> tuple[str, type] | None:
    """Return name and class if both the checkpoint and the user name the same one."""
    name = given.get("class_path") if isinstance(given, dict) else given
    path = saved.get("class_path") if isinstance(saved, dict) else None
    if not isinstance(name, str) or not isinstance(path, str):
        return None
    kind = find_class(name, [each for each in (hint, *get_args(hint)) if isinstance(each, type)])
    return (name, kind) if kind is not None and (path == name or _loaded_object(path) is kind) else None


def _imports_nothing(value: Any, hint: Any) -> bool:
    """Return whether the parser makes plain values of `value` for a setting of type `hint`."""
    while get_origin(hint) is Annotated:
        hint = hint.__origin__
    if value is None or type(value) in (bool, int, float):
        return True
    if isinstance(value, dict) and not value.keys().isdisjoint(_SPEC_KEYS):
        return False
    if isinstance(hint, dict):  # a group
        return isinstance(value, dict) and all(k in hint and _imports_nothing(v, hint[k]) for k, v in value.items())
    if members(hint) != (hint,):  # the parser may try each
        return all(_imports_nothing(value, each) for each in members(hint))
    kind = get_origin(hint) or hint
    if kind is Literal or kind in _PLAIN or (isinstance(kind, type) and issubclass(kind, Enum)):
        return True
    if kind in (Any, object) or not isinstance(kind, type):
        return _names_no_class(value)
    if is_dataclass(kind):
        return _imports_nothing(value, nested_types(kind))
    if kind.__module__ not in _CONTAINERS or not hasattr(kind, "__iter__"):
        return False
    inner = [each for each in get_args(hint) if each is not Ellipsis] or [Any]
    if isinstance(value, str):  # the parser may read it as YAML, or as a file
        return _names_no_class(value) and all(get_origin(each) is Literal or each in _PLAIN for each in inner)
    elements = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_imports_nothing(each, kind) for each in elements for kind in inner) and all(map(_names_no_class, value))


def _names_no_class(value: Any) -> bool:
    if isinstance(value, str):
        return "class_path" not in value
    inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_names_no_class, inner))


def _over(below: Tree, above: Tree) -> Tree:
    both = {
        key: _over(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def _differences(final: Tree, saved: Tree, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, theirs in saved.items():
        if key not in final or final[key] == theirs:
            continue
        mine = final[key]
        if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
            yield from _differences(mine, theirs, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", mine, theirs
