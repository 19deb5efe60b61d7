"""Laying a user's configuration over a preset, by class, and saying what the user overrides.

LightningCLI lays one file over another key by key, and there a list replaces a list. That is not what users mean who
name one callback more than a preset has, so the lists of ``trainer:`` are merged by class, and of things of which a
Trainer takes one, such as a precision, the user's stays.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from jsonargparse import get_loader

from lightning_ups.config.layers import LISTS, Keys, Layer, Tree, class_name, items
from lightning_ups.config.spelling import suggestion

__all__ = ["over_preset"]


def over_preset(
    preset: Layer,
    layers: Sequence[Layer],
    *,
    find_class: Callable[[str], type | None],
    precision: type,
    slots: Sequence[type] = (),
) -> tuple[list[Layer], list[str]]:
    """Return copies of the layers, the preset first, in which the user's settings win, and a line for each that does.

    Args:
        preset: What lies below.
        layers: What the user says, the strongest last.
        find_class: Returns the class of a name as it is written in YAML.
        precision: The class of the plugins that ``trainer.precision`` stands for as well.
        slots: Further classes of plugins of which a Trainer takes one.

    Raises:
        ValueError: If a layer takes away what the preset does not have.
    """
    base, *above = (replace(layer, tree=deepcopy(layer.tree)) for layer in (preset, *layers))
    merge = _Merge(find_class, precision, (precision, *slots))
    merge.one_for_each_slot(base, above)
    for name in LISTS:
        merge.by_class(name, base, above)
    merge.values(base, above)
    return [base, *above], merge.said


class _Merge:
    """Changes layers in place, and remembers what the user overrides."""

    def __init__(self, find_class: Callable[[str], type | None], precision: type, slots: Sequence[type]) -> None:
        self._find_class, self._precision, self._slots = find_class, precision, slots
        self.said: list[str] = []

    def one_for_each_slot(self, preset: Layer, layers: Sequence[Layer]) -> None:
        """Take the preset's precision and plugins away where the user has chosen others for their slots."""
        first = _last_to_replace("plugins", layers) or 0
        for index, layer in enumerate(layers):
            if (chosen := layer.trainer.get("precision")) is not None:
                place = layer.place("trainer", "precision")
                self._drop(preset, lambda kind: issubclass(kind, self._precision), f"{place}: precision {chosen}")
            for key, kind in self._plugins(layer) if index >= first else ():
                place = f"{layer.place('trainer', key)}: {kind.__name__}"
                if issubclass(kind, self._precision) and (given := preset.trainer.pop("precision", None)):
                    self.said.append(f"{place} instead of precision {given}")
                self._drop(preset, lambda other, kind=kind: other is not kind and self._one_slot(kind, other), place)

    def _plugins(self, layer: Layer) -> Iterator[tuple[str, type]]:
        for key in ("plugins", "plugins+"):
            for kind in filter(None, map(self._kind, items(layer.trainer.get(key)))):
                yield key, kind

    def _one_slot(self, kind: type, other: type) -> bool:
        return any(issubclass(kind, slot) and issubclass(other, slot) for slot in self._slots)

    def _drop(self, preset: Layer, unwanted: Callable[[type], bool], instead: str) -> None:
        kept = []
        for item in items(preset.trainer.get("plugins")):
            if (kind := self._kind(item)) is not None and unwanted(kind):
                self.said.append(f"{instead} instead of {kind.__name__}")
            else:
                kept.append(item)
        if "plugins" in preset.trainer:
            preset.trainer["plugins"] = kept

    def by_class(self, name: str, preset: Layer, layers: Sequence[Layer]) -> None:
        """Merge the preset's list ``name`` into the last one that replaces it, and those that append."""
        standing = items(preset.trainer.pop(name, None))
        for layer in layers:
            standing = self._without(standing, name, layer, preset)
        first = _last_to_replace(name, layers)
        for layer in layers[first or 0 :]:
            for key in (name, f"{name}+"):
                if key in layer.trainer:
                    layer.trainer[key] = self._over(standing, layer, key)
        lowest = preset if first is None else layers[first]
        if standing:
            lowest.trainer[name] = [*standing, *items(lowest.trainer.get(name))]

    def _without(self, standing: list[Any], name: str, layer: Layer, preset: Layer) -> list[Any]:
        place = layer.place("trainer", f"{name}-")
        for unwanted in items(layer.trainer.pop(f"{name}-", None)):
            left = [item for item in standing if self._kind(item) is not self._kind(unwanted)]
            if len(left) == len(standing):
                there = [kind.__name__ for kind in map(self._kind, standing) if kind]
                raise ValueError(
                    f"{place}: {name}- takes {class_name(unwanted)} away, which is not there."
                    f" It takes classes out of {preset.name}. {suggestion(class_name(unwanted), there)}"
                )
            standing = left
            self.said.append(f"{place}: without {class_name(unwanted)}")
        return standing

    def _over(self, standing: list[Any], layer: Layer, key: str) -> list[Any]:
        """Return the items of ``layer``, each with what the preset's item of its class adds, which stands no more."""
        mine = items(layer.trainer[key])
        kinds = [self._kind(item) for item in mine]
        merged = []
        for index, (item, kind) in enumerate(zip(mine, kinds, strict=True)):
            base = next((other for other in standing if kind is not None and self._kind(other) is kind), None)
            if base is not None and kinds.count(kind) == 1:
                item = self._merged(base, item, layer, ("trainer", key, index))
            merged.append(item)  # who lists a class twice means these two, with nothing of the preset's
        standing[:] = [other for other in standing if (kind := self._kind(other)) is None or kind not in kinds]
        return merged

    def _merged(self, base: Tree | str, item: Tree | str, layer: Layer, keys: Keys) -> Tree:
        below, above = _init_args(base), _init_args(item)
        for name, value in above.items():
            if name in below and not _same(below[name], value):
                place = layer.place(*keys, "init_args", name)
                self.said.append(f"{place}: {class_name(item)}.{name} {_brief(value)} instead of {_brief(below[name])}")
        spec: Tree = {"class_path": item} if isinstance(item, str) else item
        return spec | ({"init_args": below | above} if below | above else {})

    def values(self, preset: Layer, layers: Sequence[Layer]) -> None:
        """Say which other values the user overrides; a class gives way to another one whole."""
        for keys, value in [*_leaves(preset.tree)]:
            layer = next((layer for layer in reversed(layers) if _has(layer.tree, keys)), None)
            if layer is None:
                continue
            tree, key = _inside(layer.tree, keys[:-1]), keys[-1]
            if not isinstance(value, dict):
                if not _same(value, tree[key]):
                    self._say_value(layer, keys, tree[key], value)
                continue
            theirs, kind = tree[key], self._kind(value)
            if kind is not None and self._kind(theirs) is kind:
                tree[key] = self._merged(value, theirs, layer, keys)
            elif not isinstance(theirs, dict) or "class_path" in theirs:
                self._say_value(layer, keys, theirs, value)
                del _inside(preset.tree, keys[:-1])[key]

    def _say_value(self, layer: Layer, keys: tuple[str, ...], mine: Any, value: Any) -> None:
        self.said.append(f"{layer.place(*keys)}: {'.'.join(keys)} {_brief(mine)} instead of {_brief(value)}")

    def _kind(self, item: Any) -> type | None:
        name = item.get("class_path") if isinstance(item, dict) else item
        return self._find_class(name) if isinstance(name, str) else None


def _last_to_replace(name: str, layers: Sequence[Layer]) -> int | None:
    """Return the index of the last layer that has the list ``name`` itself: what others said of that before is gone."""
    return max((index for index, layer in enumerate(layers) if name in layer.trainer), default=None)


def _init_args(item: Tree | str) -> Tree:
    return dict(item.get("init_args") or {}) if isinstance(item, dict) else {}


def _leaves(tree: Tree, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and "class_path" not in value:
            yield from _leaves(value, (*keys, key))
        elif keys != ("trainer",) or key not in LISTS:
            yield (*keys, key), value


def _has(tree: Any, keys: Sequence[str]) -> bool:
    outer = _inside(tree, keys[:-1])
    return isinstance(outer, dict) and keys[-1] in outer


def _inside(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _same(value: Any, other: Any) -> bool:
    # An option of the command line is still text.
    return value == other or (isinstance(other, str) and get_loader("yaml")(other) == value)


def _brief(value: Any) -> str:
    return class_name(value) if isinstance(value, dict) and "class_path" in value else str(value)
