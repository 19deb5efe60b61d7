"""Fragments of YAML: trees of settings that are merged, and the text of the result."""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import yaml

Tree = dict[str, Any]


def appending(tree: Mapping[str, Any]) -> Tree:
    """Return a copy of a fragment whose lists of callbacks and plugins append to those of the run."""
    copy = deepcopy(dict(tree))
    trainer = copy.get("trainer")
    if isinstance(trainer, dict):
        for name in ("callbacks", "plugins"):
            if trainer.get(name) is not None:
                value = trainer.pop(name)
                trainer[f"{name}+"] = _items(trainer.get(f"{name}+")) + _items(value)
    return copy


def merged(trees: Iterable[Mapping[str, Any]]) -> Tree:
    """Merge fragments, the stronger ones last; lists of callbacks and plugins are joined."""
    result: Tree = {}
    for tree in trees:
        _merge(result, tree)
    return result


def text_of(tree: Mapping[str, Any]) -> str:
    """Return a fragment as YAML that the command line reads back with the same types."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def leaves(tree: Mapping[str, Any], *keys: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting; lists and classes are values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and "class_path" not in value:
            yield from leaves(value, *keys, str(key))
        else:
            yield ".".join((*keys, str(key))), value


class _Dumper(yaml.SafeDumper):
    """Quotes strings that another YAML reader would take for numbers, as 1e-3."""


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    is_plain = re.fullmatch(r"[A-Za-z_][\w.+-]*", value) and yaml.safe_load(value) == value
    style = None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _string)


def _merge(into: Tree, tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif key.endswith("+") and key in into:
            into[key] = _items(into[key]) + deepcopy(_items(value))
        else:
            into[key] = deepcopy(value)


def _items(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list) else [value]
