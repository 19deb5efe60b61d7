"""Find what is wrong with a configuration: each fault with file and line, and the name that was probably meant.

The parser stops at the first fault and lists every type that it tried. This module looks at each setting by itself.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_ups._compat.lightning.trainer import class_settings
from lightning_ups.config.classes import classes_of, find_class, is_public, members, subclasses
from lightning_ups.config.command_line import unexpected_word
from lightning_ups.config.layers import Keys, Layer, Tree, items, section
from lightning_ups.config.suggestions import nearest, suggest

_NEAR = 0.75  # CometLogger is not near NeptuneLogger
_SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What a parser takes."""

    types: Mapping[str, Any]  # of each key
    required: Sequence[str] = ()  # keys that must name a class
    nullable: Callable[[str], bool] = lambda _: False  # whether a key takes null though its type does not
    other_options: Sequence[str] = ()  # only to be suggested for a misspelled one


def find_faults(schema: Schema, layers: Sequence[Layer], *, accepted: bool) -> list[str]:
    """Return all faults of `layers`, the strongest last, one line each.

    A parser that has `accepted` them ignores null and empty mappings where they have no effect: only those are faults.
    """
    search = _Search(schema, layers, accepted=accepted)
    faults = [fault for layer in layers for fault in search.settings(layer.tree, schema.types, (), layer)]
    if not faults and not accepted:
        faults = [*search.missing()]
    return list(dict.fromkeys(faults))


def summarize(error: Exception) -> str:
    """Return the first lines of the parser's error, for a fault that `find_faults` does not find."""
    text = str(error)
    if found := re.match(r"[Uu]nrecognized arguments: (?!--)(\S+)", text):
        return unexpected_word(found[1])
    noise = ("Subtypes:", "Errors:", "Given value", "Does not validate", "- Expected a <class 'NoneType'>")
    lines = [line.strip() for line in text.splitlines()]
    return " ".join([line for line in lines if line and not line.startswith(noise)][:4])


class _Search:
    def __init__(self, schema: Schema, layers: Sequence[Layer], *, accepted: bool) -> None:
        self.schema, self.layers, self.accepted = schema, layers, accepted

    def settings(
        self,
        tree: Tree,
        types: Mapping[str, Any],
        keys: Keys,
        layer: Layer,
        *,
        owner: type | None = None,
        group: str = "",
    ) -> Iterator[str]:
        """Yield the faults of settings: those of the parser, or of the class `owner`, in the section `group`."""
        for key, value in tree.items():
            name, where = f"{group}{key}".removesuffix("+"), (*keys, key)
            below = next((known for known in types if known.startswith(f"{name}.")), None)
            if name in types:
                yield from self.setting(name, value, types[name], where, layer, owner)
            elif below and isinstance(value, dict):
                inner = value["init_args"] if [*value] == ["init_args"] else value  # typed, for a fixed class
                yield from self.settings(inner, types, where, layer, owner=owner, group=f"{name}.")
            elif below and (self.accepted or value is None or f"{name}.enabled" in types):
                continue  # a section without settings, or switched on or off
            elif below:
                yield f"{layer.place(*where)}: {_dotted(where)} is {value!r}. It takes settings, such as {below}."
            elif not self.accepted or _is_empty(value):
                yield self._unknown(name, types, where, layer, owner)

    def _unknown(self, name: str, types: Mapping[str, Any], keys: Keys, layer: Layer, owner: type | None) -> str:
        place = f"{layer.place(*keys)}: "
        sections = {known[: dot.start()] for known in types for dot in re.finditer(r"\.", known)}
        if owner is None:
            group = f"{name.rpartition('.')[0]}."
            siblings = [known for known in types if known.startswith(group)] or [
                known.partition(".")[0] for known in types
            ]
            near = nearest(name, {*types, *sections, *self.schema.other_options})
            hint = f"Did you mean {near!r}?" if near else suggest("", {*siblings}, most=40)
            return f"{place}unknown setting {name!r}. {hint}"
        if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(owner).parameters.values()):
            near = nearest(name, types)
            hint = f"Did you mean {near!r}?" if near else "If it is passed on by **kwargs, give it under dict_kwargs."
        else:
            hint = suggest(name, types, most=40, otherwise="It takes no settings.")
        return f"{place}{owner.__name__} has no setting {name!r}. {hint}"

    def setting(self, name: str, value: Any, hint: Any, keys: Keys, layer: Layer, owner: type | None) -> Iterator[str]:
        """Yield the faults of one setting."""
        bases = classes_of(hint)
        if value is None:
            is_default = name in _required(owner) if owner else self.schema.nullable(name)
            if not (is_default or _takes_null(hint)):
                yield f"{layer.place(*keys)}: {_dotted(keys)} is null. It takes {_described(hint)}."
        elif bases and isinstance(value, list) and _takes_list(hint):
            for index, item in enumerate(value):
                yield from self.setting(name, item, hint, (*keys, index), layer, owner)
        elif bases and isinstance(value, dict) and (not _takes(hint, Mapping) or "class_path" in value):
            yield from self.spec(value, bases, hint, keys, layer)
        elif self.accepted or _accepts(value, hint):
            return
        elif bases and isinstance(value, str) and str not in members(hint):
            yield from self.class_path(value, bases, keys, layer)
            yield from self._incomplete(find_class(value, bases), {}, keys, layer)
        else:
            near = _nearest_choice(value, hint)
            if bases and isinstance(value, list):
                value_of, wanted = f"a list: {value!r}", f"one {bases[0].__name__}, without brackets and dashes"
                yield f"{layer.place(*keys)}: {_dotted(keys)} is {value_of}. It takes {wanted}."
                return
            listed = f", as in [{value!r}]" if isinstance(value, str) and _takes_list_of_strings(hint) else ""
            cure = f"Did you mean {near!r}?" if near else f"It takes {_described(hint)}{listed}."
            yield f"{layer.place(*keys)}: {_dotted(keys)} is {value!r}. {cure}"

    def spec(self, spec: Tree, bases: Sequence[type], hint: Any, keys: Keys, layer: Layer) -> Iterator[str]:
        """Yield the faults of a class and its settings."""
        name = spec.get("class_path") or self._class_given_at(keys)
        kind = find_class(name, bases) if isinstance(name, str) else None
        arguments = spec.get("init_args")
        if not self.accepted:
            if wrong := [key for key in spec if key not in _SPEC_KEYS]:
                if all(find_class(str(key), bases) for key in spec):
                    yield self._class_as_key(spec, hint, keys, layer)
                    return
                if kind and wrong[0] in class_settings(kind):
                    cure = "Put it below init_args."
                elif name is None:
                    cure = "Name the class by class_path, and put its settings below init_args."
                else:
                    cure = suggest(wrong[0], _SPEC_KEYS)
                yield f"{layer.place(*keys, wrong[0])}: unexpected key {wrong[0]!r} in {_dotted(keys)}. {cure}"
                return
            if not isinstance(name, str):
                yield f"{layer.place(*keys)}: {_dotted(keys)} has no class_path. It takes {_described(hint)}."
                return
            if not isinstance(arguments, dict | NoneType):
                place = layer.place(*keys, "init_args")
                yield f"{place}: init_args is {arguments!r}. It takes a mapping, NAME: VALUE, without dashes."
                return
            yield from self.class_path(name, bases, (*keys, "class_path"), layer)
        if kind is not None and issubclass(kind, tuple(bases)):
            types, given = class_settings(kind), section(spec, "init_args")
            yield from self.settings(given, types, (*keys, "init_args"), layer, owner=kind)
            yield from self._incomplete(kind, given, keys, layer)

    def _class_as_key(self, spec: Tree, hint: Any, keys: Keys, layer: Layer) -> str:
        specs = [
            {"class_path": name, "init_args": settings} if settings else {"class_path": name}
            for name, settings in spec.items()
        ]
        is_list = _takes_list(hint) and not isinstance(keys[-1], int)
        written = yaml.safe_dump(specs if is_list else specs[0], default_flow_style=True, sort_keys=False, width=1000)
        name = "" if isinstance(keys[-1], int) else f"{keys[-1]}: "
        place = layer.place(*keys, next(iter(spec)))
        return f"{place}: {next(iter(spec))} is a class, not a setting. Write {name}{written.strip()}"

    def _incomplete(self, kind: type | None, given: Tree, keys: Keys, layer: Layer) -> Iterator[str]:
        # Only for an item of a list: the settings of any other class may come from another layer.
        if kind is None or self.accepted or not isinstance(keys[-1], int) or not layer.lines:
            return
        if missing := [name for name in _required(kind) if name not in given]:
            yield f"{layer.place(*keys)}: {kind.__name__} needs {' and '.join(missing)} below init_args."

    def class_path(self, name: str, bases: Sequence[type], keys: Keys, layer: Layer) -> Iterator[str]:
        """Yield why `name` does not name a subclass of `bases`."""
        place, wanted = f"{layer.place(*keys)}: ", " or ".join(base.__name__ for base in bases)
        every = (find_class(name, classes_of(hint)) for hint in self.schema.types.values())
        known = find_class(name, bases) or next(filter(None, every), None)
        if known is not None:
            if not issubclass(known, tuple(bases)):
                right = next(
                    (key for key, hint in self.schema.types.items() if issubclass(known, tuple(classes_of(hint)))), None
                )
                yield f"{place}{name} is not a {wanted}.{f' Move it to {right}.' if right else ''}"
            return
        if Strategy in bases and name.lower() in StrategyRegistry:
            entry = StrategyRegistry[name.lower()]
            class_ = entry["strategy"].__name__ if isinstance(entry["strategy"], type) else entry["description"]
            arguments = [f"{key}={value!r}" for key, value in entry["init_params"].items() if value != "popen"]
            more = f" with {', '.join(arguments)}" if arguments else ""
            yield f"{place}the strategy {name!r} takes no settings. Write its class: {class_.rpartition('.')[2]}{more}."
            return
        module, _, attribute = name.rpartition(".")
        if not module:
            concrete = [kind for kind in subclasses(bases) if not inspect.isabstract(kind)]
            public = {kind.__name__ for kind in concrete if is_public(f"{kind.__module__}.{kind.__name__}")}
            yield (
                f"{place}unknown {wanted} {name!r}. {suggest(name, public, cutoff=_NEAR)}"
                f" A class of your own needs its module, as in 'package.module.{name}'."
            )
        elif error := _import_error(module):
            yield f"{place}cannot import {name!r}: {error}. Check the name, and run where the module can be imported."
        else:
            classes = {key: kind for key, kind in vars(sys.modules[module]).items() if inspect.isclass(kind)}
            fitting = [key for key, kind in classes.items() if issubclass(kind, tuple(bases))]
            hint = suggest(attribute, fitting or classes, cutoff=_NEAR)
            if (elsewhere := find_class(attribute, bases)) is not None:
                hint = f"Write '{elsewhere.__module__}.{attribute}'."
                if is_public(f"{elsewhere.__module__}.{attribute}") and elsewhere.__module__.startswith("lightning"):
                    hint = f"Write {attribute!r}."
            yield f"{place}the module {module} has no class {attribute!r}. {hint}"

    def _class_given_at(self, keys: Keys) -> str | None:
        """Return the class that the strongest layer names at `keys`, for a layer that gives only settings of it."""
        for layer in reversed(self.layers):
            spec = section(layer.tree, *map(str, keys[:-1])).get(str(keys[-1]))
            name = spec.get("class_path") if isinstance(spec, dict) else spec
            if isinstance(name, str):
                return name
        return None

    def missing(self) -> Iterator[str]:
        """Yield the required classes, and the required settings of classes, that no layer gives."""
        for key in self.schema.required:
            if self._class_given_at((key,)) is None:
                yield f"{key!r} is missing. Name a class: class_path below {key!r}, or --{key} CLASS."
        for key, hint in self.schema.types.items():
            keys, bases = (*key.split("."),), classes_of(hint)
            kind = find_class(name, bases) if bases and (name := self._class_given_at(keys)) else None
            given = {name for layer in self.layers for name in section(layer.tree, *keys, "init_args")}
            if kind and (lacking := [name for name in _required(kind) if name not in given]):
                yield f"{key}: {kind.__name__} needs {' and '.join(lacking)}, such as --{key}.{lacking[0]} VALUE."


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: an empty name
        return str(error)
    return None


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_empty, value.values()))


def _dotted(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _required(kind: type) -> list[str]:
    settings = class_settings(kind)
    parameters = inspect.signature(kind).parameters
    return [name for name, each in parameters.items() if each.default is each.empty and name in settings]


def _takes_null(hint: Any) -> bool:
    kinds = [get_origin(each) or each for each in members(hint)]
    if any(kind is Literal for kind in kinds) and None in _choices(hint):
        return True
    others = [kind for kind in kinds if kind is not Literal]
    return any(kind in (Any, NoneType, object) or not isinstance(kind, type) for kind in others)


def _takes(hint: Any, base: type) -> bool:
    kinds = [get_origin(each) or each for each in members(hint)]
    return any(isinstance(kind, type) and issubclass(kind, base) for kind in kinds)


def _takes_list(hint: Any) -> bool:
    return any(_takes(each, Iterable) and not _takes(each, str) for each in members(hint))


def _takes_list_of_strings(hint: Any) -> bool:
    return any(
        isinstance(get_origin(each), type) and issubclass(get_origin(each), Sequence) and get_args(each)[:1] == (str,)
        for each in members(hint)
    )


def _accepts(value: Any, hint: Any) -> bool:
    if hint is None:
        return True
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=hint)
    try:
        parser.parse_object({"it": deepcopy(value)})  # the parser changes lists in place
    except ArgumentError:
        return False
    return True


def _described(hint: Any) -> str:
    return " or ".join(dict.fromkeys(_names(hint)))


def _names(hint: Any) -> Iterator[str]:
    for each in members(hint):
        if get_origin(each) is Literal or (isinstance(each, type) and issubclass(each, Enum)):
            yield from map(repr, _choices(each))
        elif each is NoneType:
            yield "null"
        else:
            plain = isinstance(each, type) and not get_args(each)
            yield each.__name__ if plain else re.sub(r"\b(\w+\.)+", "", str(each))


def _nearest_choice(value: Any, hint: Any) -> str | None:
    choices = _choices(hint)
    wrong = [item for item in items(value) if item not in choices]
    return nearest(str(wrong[0]), map(str, choices)) if wrong else None


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [each.name for each in hint]
    return [choice for each in get_args(hint) for choice in _choices(each)]
