"""Merge the lists ``trainer.callbacks`` and ``trainer.plugins`` of a preset, of files and of typed options, by class.

In LightningCLI a list replaces a list. Over a preset, an item replaces the preset's item of the same class, and the
preset's other items stay.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from jsonargparse import get_loader
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.strategies import Strategy

from lightning_ups.config.classes import class_name, find_class
from lightning_ups.config.layers import Layer, Tree, items, section
from lightning_ups.config.suggestions import nearest, suggest

LISTS = ("callbacks", "plugins")  # of trainer
_SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")
_BASES = (Callback, Precision, CheckpointIO, ClusterEnvironment, LayerSync, Strategy, Logger)


def kind_of(item: Any) -> type | None:
    """Return the class that an item of a list names, or None if there is no such class."""
    name = item.get("class_path") if isinstance(item, dict) else item
    return find_class(name, _BASES) if isinstance(name, str) else None


def parse_value(text: str) -> Any:
    """Parse a list or a mapping. Other text stays: only the parser knows whether "3" is meant as a number."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text


def put(tree: Tree, keys: Sequence[str], value: Any, classes: Sequence[str] = ()) -> None:
    """Set ``tree[keys[0]][keys[1]]...``; a key below one of `classes` is one of its ``init_args``."""
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(tree.get(key), dict):
            tree[key] = {"class_path": tree[key]} if tree.get(key) else {}
        tree = tree[key]
        if ".".join(keys[:depth]) in classes and keys[depth] not in _SPEC_KEYS:
            tree = tree.setdefault("init_args", {})
    tree[keys[-1]] = value


@dataclass
class _Item:
    spec: Any
    place: Callable[..., str]  # file and line, of a key below the item
    is_typed: bool = False


class MergedList:
    """One list of ``trainer``: of the preset, then of files, then of options in the order in which they stand."""

    def __init__(self, name: str, preset: Layer | None) -> None:
        self.name, self._has_preset = name, preset is not None
        self.of_preset: list[Any] = items(section(preset.tree, "trainer").pop(name, None)) if preset else []
        self.of_user: list[_Item] = []
        self.replaces = False  # what another source outside of this package lists
        self.typed: list[Tree] = []
        self.notes: list[str] = []

    def add_file(self, layer: Layer) -> None:
        """Take the list out of a file's settings, and apply it."""
        trainer = section(layer.tree, "trainer")
        for sign in ("-", "", "+"):
            if (key := f"{self.name}{sign}") in trainer:
                self._change(sign, items(trainer.pop(key)), partial(layer.place, "trainer", key))

    def add_option(self, key: str, text: str) -> bool:
        """Apply ``--trainer.NAME<key> text``; return False to leave it to the parser.

        Raises:
            ValueError: If the option names a class that is not listed, or listed twice, or no setting of it.
        """
        if key in ("-", "", "+"):
            value = parse_value(text)
            self._change(key, items(None if value == "null" else value))
            return True
        first, *rest = key.removeprefix(".").split(".")
        found = [item for item in self.of_user if class_name(item.spec) == first]
        below = [item for item in self.of_preset if class_name(item) == first]
        option = f"--trainer.{self.name}{key}"
        if not (found or below or first[:1].isupper()):
            if not (self.of_user and self.of_user[-1].is_typed):
                return False  # jsonargparse sets it on the last item
            put(self.of_user[-1].spec, _below_spec([first, *rest]), parse_value(text))
            return True
        if not rest:
            raise ValueError(f"{option}: {first} is a class. Add the name of a setting: {option}.NAME VALUE.")
        if len(found) > 1:
            raise ValueError(f"{option}: {first} is listed {len(found)} times. Change it in the file.")
        if not (found or below):
            near = nearest(first, map(class_name, [*(item.spec for item in self.of_user), *self.of_preset]))
            add = f"--trainer.{self.name}+={first} --trainer.{self.name}.{'.'.join(rest)} {shlex.quote(text)}"
            cure = f"Did you mean {near!r}?" if near else f"To add one: {add}"
            raise ValueError(f"{option}: trainer.{self.name} lists no {first}. {cure}")
        if not found:
            self._change("+", [{"class_path": below[0]["class_path"]}])
            found = self.of_user[-1:]
        put(found[0].spec, _below_spec(rest), parse_value(text))
        if not found[0].is_typed:
            self.typed.append({"class_path": first})
            put(self.typed[-1], _below_spec(rest), parse_value(text))
        return True

    def _change(self, sign: str, given: list[Any], place: Callable[..., str] | None = None) -> None:
        if sign == "-":
            for each in given:
                self._remove(each, place() if place else "the command line")
            return
        if sign == "":
            self.of_user, self.typed, self.replaces = [], [], True
        for index, each in enumerate(given):
            spec = {"class_path": each} if isinstance(each, str) else deepcopy(each)
            where = partial(place, index) if place else lambda *_: "the command line"
            self.of_user.append(_Item(spec, where, is_typed=place is None))
            if place is None:
                self.typed.append(spec)

    def _remove(self, item: Any, place: str) -> None:
        left = [other for other in self.of_preset if kind_of(other) is not kind_of(item)]
        if len(left) == len(self.of_preset):
            why = f"the preset does not list {class_name(item)}" if self._has_preset else "there is no preset"
            cure = suggest(class_name(item), map(class_name, left)) if self._has_preset else "Add --preset NAME."
            raise ValueError(f"{place}: {self.name}- removes items of a preset, and {why}. {cure}")
        self.of_preset = left
        self.notes.append(f"{place}: without {class_name(item)}")

    def merged(self) -> list[_Item]:
        """Return the items: those of the preset that the user does not list, then the user's."""
        kinds = [kind_of(item.spec) for item in self.of_user]
        below = {kind: spec for spec in self.of_preset if (kind := kind_of(spec)) is not None}
        user = [
            self._over(below[kind], item) if kind in below and kinds.count(kind) == 1 else item
            for item, kind in zip(self.of_user, kinds, strict=True)
        ]
        left = [spec for spec in self.of_preset if (kind := kind_of(spec)) is None or kind not in kinds]
        return [*(_Item(spec, lambda *_: "preset") for spec in left), *user]

    def _over(self, preset: Tree, item: _Item) -> _Item:
        below, above = section(preset, "init_args"), section(item.spec, "init_args")
        for name, value in above.items():
            if name in below and not _same(below[name], value):
                what = f"{class_name(item.spec)}.{name} {value} instead of {below[name]}"
                self.notes.append(f"{item.place('init_args', name)}: {what}")
        return _Item(item.spec | ({"init_args": below | above} if below | above else {}), item.place, item.is_typed)


def _below_spec(keys: list[str]) -> list[str]:
    return keys if keys[0] in _SPEC_KEYS else ["init_args", *keys]


def drop_precision(preset: Layer | None, plugins: MergedList, layers: Sequence[Layer]) -> Iterator[str]:
    """Take the precision out of a preset if the user chose one: a Trainer has one. Yield a note if so.

    Raises:
        ValueError: If the user chose two.
    """
    named = [layer for layer in layers if "precision" in section(layer.tree, "trainer")][-1:]
    chosen: list[tuple[type | None, str]] = [
        (None, f"{layer.place('trainer', 'precision')}: precision {name}")
        for layer in named
        if (name := layer.tree["trainer"]["precision"]) not in (None, "null")
    ]
    chosen += [
        (kind, f"{item.place()}: {kind.__name__}")
        for item in plugins.of_user
        if (kind := kind_of(item.spec)) is not None and issubclass(kind, Precision)
    ]
    if len(chosen) > 1:
        found = "\n".join(f"  {text}" for _, text in chosen)
        raise ValueError(f"Two precisions are given, and a Trainer takes one. Keep one of them:\n{found}")
    if preset is None:
        return
    trainer = section(preset.tree, "trainer")
    if any(kind for kind, _ in chosen) and (name := trainer.pop("precision", None)):
        yield f"{chosen[-1][1]} instead of precision {name}"
    for spec in [*plugins.of_preset]:
        kind = kind_of(spec)
        others = [text for other, text in chosen if other is not kind]
        if kind is not None and issubclass(kind, Precision) and others:
            plugins.of_preset.remove(spec)
            yield f"{others[-1]} instead of {kind.__name__}"


def overridden_values(preset: Tree, layers: Sequence[Layer], keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a note for each value of the preset that a layer overrides."""
    for key, value in preset.items():
        if isinstance(value, dict):
            yield from overridden_values(value, layers, (*keys, key))
            continue
        for layer in reversed(layers):
            tree = section(layer.tree, *keys)
            if key in tree:
                if not _same(value, tree[key]):
                    what = f"{'.'.join((*keys, key))} {tree[key]} instead of {value}"
                    yield f"{layer.place(*keys, key)}: {what}"
                break


def _same(value: Any, other: Any) -> bool:
    # An option is still text.
    return value == other or (isinstance(other, str) and get_loader("yaml")(other) == value)
