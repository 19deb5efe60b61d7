"""Layers of settings: presets, YAML files and the command line, each a tree of plain values that knows its lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_ups.config import presets
from lightning_ups.config.suggestions import check_config

Tree = dict[str, Any]
Keys = tuple[str | int, ...]  # the path to a value: ("trainer", "callbacks", 0, "init_args", "blocks")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One source of settings."""

    name: str  # in messages: a path, or "the command line"
    tree: Tree
    folder: Path | None = None  # where relative paths in it start; None: the working directory
    lines: Mapping[Keys, int] = field(default_factory=dict)  # the line of each key

    @property
    def text(self) -> str:
        """The tree as YAML."""
        # Strings are quoted, because jsonargparse reads 1e-3 as a number and PyYAML writes it as a plain string.
        return yaml.dump(self.tree, Dumper=_Quoting, sort_keys=False, allow_unicode=True)

    def place(self, *keys: str | int) -> str:
        """Return file and line of the value at `keys`, as far as they are known."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.name}:{self.lines[keys]}" if keys else self.name


class _Quoting(yaml.SafeDumper):
    pass


_Quoting.add_representer(str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"'))


def items(value: Any) -> list[Any]:
    """Return `value` as a list: YAML may give a single item without one."""
    return [] if value is None else [*value] if isinstance(value, list) else [value]


def section(tree: Any, *keys: str) -> Tree:
    """Return the mapping at ``tree[keys[0]][keys[1]]...``, or an empty one."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def preset_layer(name: str) -> Layer:
    """Return the layer of a preset."""
    return Layer(name=f"preset {name}", tree=yaml.safe_load(presets.text(name)))


def read(source: str, *, command: str) -> Layer:
    """Read a YAML file, or YAML text given in place of a file name, as far as it is meant for `command`.

    Raises:
        ValueError: If it is not a YAML mapping, repeats a key, or names another configuration.
        FileNotFoundError: If the file does not exist.
        OSError: If the file cannot be read.
    """
    name, content, folder = _content(source)
    tree, lines = _load(name, content)
    if isinstance(tree.get(command), dict):  # one file for several commands, with sections such as "fit:" and "test:"
        lines = {keys[1:]: line for keys, line in lines.items() if keys[:1] == (command,)}
        tree = tree[command]
    layer = Layer(name=name, tree=tree, folder=folder, lines=lines)
    if tree.get("config"):
        raise ValueError(
            f"{layer.place('config')}: a file cannot include another one by the key 'config'."
            " Give each file on the command line, the stronger one last: --config A.yaml --config B.yaml."
        )
    if isinstance(tree.get("trainer"), str):  # the section may be a file of its own
        _, content, _ = _content(str((folder or Path()) / tree["trainer"]))
        tree["trainer"], _ = _load(tree["trainer"], content)
    return layer


def _content(source: str) -> tuple[str, str, Path | None]:
    if "\n" in source or source.lstrip().startswith("{"):
        return "--config", source, None
    if "://" in source:
        import fsspec

        with fsspec.open(source, "r") as file:
            return source, file.read(), None  # type: ignore[attr-defined]
    check_config(source)
    path = Path(source)
    try:
        return source, path.read_text(encoding="utf-8"), path.parent if path.is_file() else None
    except OSError as error:
        raise OSError(
            f"{source} cannot be read: {error.strerror}. Choose another file, or make it readable."
        ) from error


def _load(name: str, content: str) -> tuple[Tree, dict[Keys, int]]:
    try:
        node, tree = yaml.compose(content, Loader=yaml.SafeLoader), get_loader("yaml")(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = str(getattr(error, "problem", None) or error)
        cure = (
            "Indent with spaces: YAML takes no tabs."
            if "'\\t'" in problem
            else "Check this line and the one before for a missing space after a colon, unclosed brackets or quotes,"
            " and the indentation."
        )
        raise ValueError(f"{place}: invalid YAML: {problem}. {cure}") from error
    if not isinstance(tree, dict):
        found = "is empty" if tree is None else "is not a mapping: write NAME: VALUE, without dashes"
        raise ValueError(f"{name} {found}. For an example of a configuration, run: fit --print_config.")
    return tree, dict(_lines(name, node))


def _lines(name: str, node: yaml.Node | None, keys: Keys = ()) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                raise ValueError(
                    f"{name}:{line}: {'.'.join(map(str, (*keys, key.value)))} is given twice, first on line"
                    f" {seen[key.value]}. YAML would drop one of them. Keep one."
                )
            seen[key.value] = line
            yield (*keys, key.value), line
            yield from _lines(name, value, (*keys, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*keys, index), value.start_mark.line + 1
            yield from _lines(name, value, (*keys, index))
