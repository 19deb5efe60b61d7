"""The settings of the model that a checkpoint holds: a layer beneath what is given, and what is given otherwise."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any

from lightning_ups._compat.lightning.trainer import class_settings
from lightning_ups.config.inert_settings import inert, loaded_object
from lightning_ups.config.layers import Layer, Tree
from lightning_ups.state.checkpoint import is_complete, rest_of

__all__ = ["SavedSettings", "flat", "made_by", "settings_of", "taken_from"]

_DEEPEST = 50  # nested deeper than that, a setting is refused before the parser's recursion fails
_KEY = "hyper_parameters"
_OF_THE_COMMAND_LINE = ("_class_path", "_instantiator")
_SPEC = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """The settings of the model in a checkpoint, as YAML has them.

    Args:
        path: The checkpoint.
        name: What the user calls the class; None: the program has fixed it.
        settings: Those that the class takes.
        keywords: Which of them the class takes, but does not name.
        odd: Those that are not taken, since YAML has no form for them, and of which class they are.
        kind: The class, or a function that makes its instance.
    """

    path: Path
    name: str | None
    settings: Tree
    keywords: Collection[str] = ()
    odd: Mapping[str, str]
    kind: Callable[..., Any]

    def beneath(self, given: Tree) -> Layer:
        """Return the layer that lies beneath what is ``given`` of the model's settings, without what is given.

        What would be imported is left out, unless the same is given.
        """
        left, _ = inert(_without(self.settings, given), self.kind, given, keywords=[*self.keywords])
        tree: Tree = {key: value for key, value in left.items() if key not in self.keywords}
        if self.name is not None:
            more = {key: value for key, value in left.items() if key in self.keywords}
            tree = {"class_path": self.name, "init_args": tree, **({"dict_kwargs": more} if more else {})}
        return Layer(name=f"the checkpoint {self.path}", tree={"model": tree})

    def said(self, given: Tree) -> list[str]:
        """Return a line for each setting that stays in the checkpoint, though nothing else gives it."""
        _, names = inert(_without(self.settings, given), self.kind, given, keywords=[*self.keywords])
        defaults = {name: each.default for name, each in signature(self.kind).parameters.items()}
        held = {key: f"holds a {of}" for key, of in self.odd.items() if key not in given}
        named = {
            self._place(key): f"names {saved!r:.80}"
            for key, saved in names.items()
            if defaults.get(key) is None or loaded_object(str(saved)) is not defaults[key]
        }
        return [
            f"model.{key} is not taken from {self.path}, which {has} there. A checkpoint gives plain values, and never"
            " names code to import. Give it, unless its default is meant."
            for key, has in (held | named).items()
        ]

    def differences(self, final: Tree, given: Tree) -> list[str]:
        """Return a line for each value among the settings ``final`` that is ``given``, and is not the checkpoint's."""
        return [
            f"model.{self._place(name)} is {mine!r}, as given, and not {theirs!r}, as in the checkpoint."
            for name, mine, theirs in _differences(final, self.settings)
            if name.partition(".")[0] in {key.removesuffix("+") for key in given}
        ]

    def _place(self, name: str) -> str:
        return f"dict_kwargs.{name}" if name.partition(".")[0] in self.keywords else name


def taken_from(
    path: Path, kind: Callable[..., Any], *, name: str | None, elsewhere: Collection[str] = ()
) -> SavedSettings | None:
    """Return the settings of the model in the checkpoint at ``path``, or None if they are of another class.

    Args:
        path: A whole checkpoint, a file or a folder. What is neither gives nothing.
        kind: The class of the model, or a function that makes it.
        name: What the user calls it; None: the program has fixed it.
        elsewhere: Settings that come from another object.
    """
    if not path.exists() or not is_complete(path):
        return None
    rest, left = rest_of(path)
    saved = rest.get(_KEY)
    if not isinstance(saved, Mapping) or not _is_of(saved.get("_class_path"), kind, name):
        return None
    named = {key.partition(".")[0] for key in class_settings(kind)} - {*elsewhere}
    more = name is not None and any(each.kind is Parameter.VAR_KEYWORD for each in signature(kind).parameters.values())
    stay = {*elsewhere, *_OF_THE_COMMAND_LINE}
    if "_class_path" not in saved and isinstance(kind, type):  # from Python: classes above it put theirs beside them
        codes = [code for base in kind.__mro__[1:] if (code := getattr(base.__init__, "__code__", None))]
        theirs = (code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] for code in codes)
        stay |= {*chain.from_iterable(theirs)} - named
    odd = {key: of for place, of in left.items() for key in named if f"{place}.".startswith(f"{_KEY}.{key}.")}
    settings: Tree = {}
    for key, value in saved.items():
        if key in odd or key in stay or not (key in named or more):
            continue
        try:
            settings[str(key)] = _plain(value)
        except TypeError as error:
            odd[str(key)] = str(error)
    return SavedSettings(path=path, name=name, settings=settings, keywords={*settings} - named, odd=odd, kind=kind)


def made_by(name: str) -> Callable[..., Any] | None:
    """Return the function of this name in a module that is imported, or None: a model may be given by one."""
    found = loaded_object(name)
    return found if isinstance(found, FunctionType) else None


def settings_of(layers: Sequence[Layer]) -> Tree:
    """Return the settings of the model that ``layers`` give, the strongest last, without the keys around them."""
    given: Tree = {}
    for layer in layers:
        if isinstance(tree := layer.tree.get("model"), dict):
            given = _over(given, flat(tree))
    return given


def flat(model: Tree) -> Tree:
    """Return the settings of a model in one mapping, whether it names its class or not."""
    own = {key: value for key, value in model.items() if key not in _SPEC}
    return own | {key: value for part in _SPEC[1:] for key, value in (model.get(part) or {}).items()}


def _is_of(saved: Any, kind: Callable[..., Any], name: str | None) -> bool:
    """Return whether the class of the name ``saved`` is ``kind``; nothing that a checkpoint names is imported."""
    if saved is None or name is None or saved == name:
        return True
    return loaded_object(str(saved)) is kind


def _plain(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as YAML has it, and as the parser writes it. TypeError says what it is if not."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if depth == _DEEPEST:
        raise TypeError("nested value")
    if isinstance(value, Mapping):
        return {key: _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner, depth + 1) for inner in value]
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _over(below: Tree, above: Tree) -> Tree:
    both = {
        key: _over(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def _without(saved: Tree, given: Tree) -> Tree:
    """Return what of ``saved`` is not given, by its leaves."""
    left = {}
    for key, value in saved.items():
        if key not in given or key == "class_path":
            left[key] = value
        elif isinstance(value, dict) and isinstance(given[key], dict):
            left[key] = _without(value, given[key])
        elif isinstance(value, dict) and "class_path" in value and isinstance(given[key], str):
            left[key] = value  # of the class that is given by its name, the parser takes what fits
    return left


def _differences(final: Tree, saved: Tree, inside: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, theirs in saved.items():
        if key not in final or final[key] == theirs:
            continue
        mine, name = final[key], f"{inside}{key}"
        if not isinstance(mine, dict) or not isinstance(theirs, dict):
            yield name, mine, theirs
        elif "class_path" in theirs and mine.get("class_path") != theirs["class_path"]:
            yield f"{name}.class_path", mine.get("class_path"), theirs["class_path"]
        elif mine.keys() == theirs.keys() or "class_path" in theirs:
            yield from _differences(mine, theirs, f"{name}.")
        else:  # a mapping, which is given as a whole
            yield name, mine, theirs
