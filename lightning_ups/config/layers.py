"""Layers of configuration as YAML gives them, before anything is parsed: files, presets and the command line."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader

from lightning_ups.config import presets
from lightning_ups.config.spelling import file_suggestion, nearest

__all__ = [
    "LISTS",
    "Addressed",
    "Keys",
    "Layer",
    "Tree",
    "addressed",
    "class_name",
    "items",
    "option_layer",
    "options",
    "preset_layer",
    "read",
]

Tree = dict[str, Any]
Keys = tuple[str | int, ...]  # the way to a value: ("trainer", "callbacks", 0, "init_args", "blocks")
LISTS = ("callbacks", "plugins")  # of trainer
_DOTTED_LISTS = {f"trainer.{name}{sign}": f"{name}{sign}" for name in LISTS for sign in ("", "+", "-")}
_LISTING = tuple(f"trainer.{name}{sign}" for name in LISTS for sign in ("", "+"))
_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One source of configuration.

    Args:
        name: What the user calls it: a path, or the command line.
        tree: What it says.
        folder: Where its relative paths start. None: where the process runs.
        lines: On which line each key stands.
        whole: Whether the file says this and no more.
    """

    name: str
    tree: Tree
    folder: Path | None = None
    lines: Mapping[Keys, int] = field(default_factory=dict)
    whole: bool = True

    @property
    def text(self) -> str:
        """The tree as YAML."""
        # Quoted, since jsonargparse reads 1e-3 as a number, and PyYAML, which writes this, takes it for a plain string.
        return yaml.dump(self.tree, Dumper=_Quoting, sort_keys=False, allow_unicode=True)

    @property
    def trainer(self) -> Tree:
        """The section ``trainer``, made if there is none."""
        if not isinstance(self.tree.get("trainer"), dict):
            self.tree["trainer"] = {}
        return self.tree["trainer"]

    def place(self, *keys: str | int) -> str:
        """Return where the value at ``keys`` stands, as precisely as is known."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.name}:{self.lines[keys]}" if keys else self.name


class _Quoting(yaml.SafeDumper):
    pass


_Quoting.add_representer(str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"'))


def items(value: Any) -> list[Any]:
    """Return ``value`` as the list that it stands for in YAML."""
    return [] if value is None else [*value] if isinstance(value, list) else [value]


def preset_layer(name: str) -> Layer:
    """Return the layer of a preset.

    Raises:
        ValueError: If there is no such preset.
    """
    return Layer(name=f"preset {name}", tree=yaml.safe_load(presets.text(name)))


def read(source: str, *, command: str) -> Layer:
    """Return the layer of a file, or of YAML in place of one, as far as it is for ``command``.

    Raises:
        ValueError: If it is no YAML mapping, gives a key twice, or names another configuration.
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be read.
    """
    name, content, folder = _content(source)
    tree, lines = _loaded(name, content)
    _refuse_another(Layer(name=name, tree=tree, lines=lines))
    # A pipe, such as <(envsubst < run.yaml), gives its text once: the parser takes what was read.
    whole = folder is not None or name != source or "://" in source
    if isinstance(tree.get(command), dict):  # a file for several commands, with sections such as "fit:" and "test:"
        lines = {keys[1:]: line for keys, line in lines.items() if keys[:1] == (command,)}
        tree, whole = tree[command], False
        _refuse_another(Layer(name=name, tree=tree, lines=lines))
    if isinstance(tree.get("trainer"), str):  # the section may be a file of its own
        _, content, _ = _content(str((folder or Path()) / tree["trainer"]))
        (tree["trainer"], _), whole = _loaded(tree["trainer"], content), False
    dotted = [key for key in tree if key in _DOTTED_LISTS]  # which are merged by class where they stand in it
    if dotted and isinstance(tree.get("trainer") or {}, dict):
        tree["trainer"] = tree.get("trainer") or {}
        for key in dotted:
            if _DOTTED_LISTS[key] in tree["trainer"]:
                raise ValueError(
                    f"{name} gives {key!r} twice, with a dot and below 'trainer'. One would be lost. Keep one of them."
                )
            tree["trainer"][_DOTTED_LISTS[key]] = tree.pop(key)
            if (key,) in lines:  # and not merged from elsewhere
                lines["trainer", _DOTTED_LISTS[key]] = lines[key,]
        whole = False
    return Layer(name=name, tree=tree, folder=folder, lines=lines, whole=whole)


def _refuse_another(layer: Layer) -> None:
    if others := items(layer.tree.get("config")):
        files = [other for other in others if isinstance(other, str)] or ["OTHER.yaml"]
        words = " ".join(
            f"--config {file}" for file in (*files, "THIS.yaml" if layer.name == "--config" else layer.name)
        )
        raise ValueError(
            f"{layer.place('config')}: 'config' is {layer.tree['config']!r}."
            " A configuration that another one names would be passed over."
            f" Give both on the command line, the stronger one last: {words}"
        )


def _content(source: str) -> tuple[str, str, Path | None]:
    if "\n" in source or source.lstrip().startswith("{"):
        return "--config", source, None
    if "://" in source:
        import fsspec

        with fsspec.open(source, "r") as file:
            return source, file.read(), None  # type: ignore[attr-defined]
    path = Path(source)
    try:
        return source, path.read_text(encoding="utf-8"), path.parent if path.is_file() else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        what = f"{source!r} is a folder" if path.is_dir() else f"There is no file {source!r}"
        raise FileNotFoundError(
            f"{what}. A configuration is a file, looked for from {Path.cwd()}."
            f" {file_suggestion(source, endings=('.yaml', '.yml'))}"
        ) from error
    except OSError as error:
        raise OSError(
            f"{source} cannot be read: {error.strerror}. A configuration is read before anything is run."
            " Choose another file, or make this one readable."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is no text in UTF-8: {error.reason} at byte {error.start}."
            " A configuration is YAML, which is read as such. Save it as UTF-8."
        ) from error


def _loaded(name: str, content: str) -> tuple[Tree, dict[Keys, int]]:
    try:
        node, tree = yaml.compose(content, Loader=yaml.SafeLoader), get_loader("yaml")(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(
            f"{name}:{mark.line + 1}:{mark.column + 1}: this is no YAML: {getattr(error, 'problem', None) or error}."
            " Look there, and on the line before, for a bracket or quote that is not closed, or a wrong indent."
            if mark
            else f"{name}: this is no YAML: {error}. Save it as UTF-8 text."
        ) from error
    if not isinstance(tree, dict):
        raise ValueError(
            f"{name} {'is empty' if tree is None else f'holds no settings, but {str(tree)[:60]!r}'}."
            " A configuration is a YAML mapping, such as 'trainer:' with lines indented below it."
            " To see a whole one, run: fit --print_config."
        )
    return tree, dict(_lines(name, node))


def _lines(name: str, node: yaml.Node | None, keys: Keys = ()) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                raise ValueError(
                    f"{name}:{line}: {'.'.join(map(str, (*keys, key.value)))} is given twice,"
                    f" on line {seen[key.value]} too. YAML keeps the last and drops the first in silence. Keep one."
                )
            seen[key.value] = line
            yield (*keys, key.value), line
            yield from _lines(name, value, (*keys, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*keys, index), value.start_mark.line + 1
            yield from _lines(name, value, (*keys, index))


def options(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield key, value and spelling of each option among ``words``; of another word the key is empty."""
    index = 0
    while index < len(words):
        word, end = words[index], index + 1
        key, equals, value = word.partition("=")
        if not equals and word.startswith("--") and end < len(words) and not words[end].startswith("--"):
            value, end = words[end], end + 1
        yield key.removeprefix("--") if word.startswith("--") else "", value, [*words[index:end]]
        index = end


def option_layer(words: Sequence[str], *, classes: Sequence[str]) -> tuple[Layer, list[str]]:
    """Return what the options among ``words`` say, and the words without those that the layer's lists stand for.

    Args:
        words: The command line, without the command.
        classes: The keys that hold a class: ``--model.width 3`` is one of its ``init_args``.
    """
    tree: Tree = {}
    lists: Tree = {}
    spared: list[str] = []
    for key, text, spelled in options(words):
        keys, value = key.split("."), _value(text)
        name = keys[1].rstrip("+-") if keys[0] == "trainer" and len(keys) > 1 else ""
        if name in LISTS and keys[-1] != "help" and _put_in_list(lists, keys, value):
            continue
        spared += spelled
        if key not in ("", "config", "print_config") and name not in LISTS and keys[-1] != "help":
            _put(tree, keys, value, classes)
    layer = Layer(name="the command line", tree=tree)
    if lists:
        layer.trainer.update(lists)
    return layer, spared


def _value(text: str) -> Any:
    # Only what holds several values is read here: "3" may be meant as text, and the parser knows.
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text  # which it is for the parser too


def _put_in_list(lists: Tree, keys: list[str], value: Any) -> bool:
    """Do what jsonargparse does: ``X=`` replaces the list, ``X+=`` appends, ``X.name=`` sets its last element."""
    key, rest = keys[1], keys[2:]
    if not rest:
        lists[key] = [
            *(lists.get(key, []) if key.endswith(("+", "-")) else []),
            *items(None if value == "null" else value),
        ]
        return True
    last = next((lists[known] for known in reversed(lists) if known.removesuffix("+") == key), None)
    if not last:
        return False  # about an element that a file names
    last[-1] = _as_mapping(last[-1])
    _put(last[-1], _below_class(rest), value, ())
    return True


class Addressed(NamedTuple):
    """What `addressed` returns: the words that are left, and the layers, some of them changed."""

    words: list[str]
    layers: list[Layer]


def addressed(words: Sequence[str], layers: Sequence[Layer], *, preset: Layer | None) -> Addressed:
    """Do what options ask that name a class of a list, such as ``--trainer.callbacks.Compile.mode default``.

    What a layer lists is changed there; what only the preset lists becomes options that go over it. What only an option
    before it lists gets the setting there.

    Raises:
        ValueError: If no layer lists the class, or one does so more than once.
    """
    layers = [replace(layer, tree=deepcopy(layer.tree)) for layer in layers]
    left: list[list[str]] = [[]]  # in parts, each but the first beginning with an option that lists classes
    typed: dict[tuple[str, str], list[str]] = {}
    over: dict[tuple[str, str], list[str]] = {}
    for key, text, spelled in options(words):
        _check_names_a_setting(key, [*layers, *filter(None, [preset])])
        list_, kind, setting = _parts(key)
        found = _listing(layers, list_, kind) if setting and (list_, "") not in typed else []
        in_preset = setting and preset is not None and _listing([preset], list_, kind)
        if len(found) > 1:
            raise ValueError(
                f"--{key}: {found[0][0].name} lists {kind} {len(found)} times. The option does not say which is meant."
                f" Change it in {found[0][0].name}."
            )
        if found:
            ((layer, there, index),) = found
            layers = [replace(each, whole=False) if each is layer else each for each in layers]
            there[index] = _as_mapping(there[index])
            _put(there[index], _below_class(setting), _value(text), ())
        elif in_preset and preset is not None:
            over.setdefault((list_, kind), []).append(f"--trainer.{list_}.{'.'.join(setting)}={text}")
        elif setting and (list_, kind) in typed:
            typed[list_, kind].append(f"--trainer.{list_}.{'.'.join(setting)}={text}")
        elif setting and kind[:1].isupper():
            known = {class_name(item) for each in (*layers, *filter(None, [preset])) for item in _listed(each, list_)}
            add = f"Add one by --trainer.{list_}+={kind} --trainer.{list_}.{'.'.join(setting)} VALUE."
            near = nearest(kind, known)
            raise ValueError(
                f"--{key}: no {kind} is listed in trainer.{list_}. An option of this form changes what is."
                f" {f'Did you mean {near!r}?' if near else add}"
            )
        elif key in _LISTING:
            left.append(spelled)
            _note_typed(typed, key, spelled)
        else:
            left[-1] += spelled
    added = [word for (list_, kind), more in over.items() for word in (f"--trainer.{list_}+={kind}", *more)]
    return Addressed([*added, *chain(*left)], layers)


def _note_typed(typed: dict[tuple[str, str], list[str]], key: str, words: list[str]) -> None:
    """Note which class an option lists last, and, as a class without a name, that it replaces what files list."""
    list_, name = key.removeprefix("trainer."), key.removeprefix("trainer.").removesuffix("+")
    if name == list_:
        for known in [known for known in typed if known[0] == name]:
            del typed[known]
        typed[name, ""] = words
    if listed := option_layer(words, classes=())[0].trainer.get(list_):
        typed[name, class_name(listed[-1])] = words


def _check_names_a_setting(key: str, layers: Sequence[Layer]) -> None:
    """Raise ValueError if an option names a class of a list, and none of its settings."""
    keys = key.split(".")
    if len(keys) != 3 or keys[0] != "trainer" or keys[1] not in LISTS:
        return
    list_, kind = keys[1:]
    if kind in {class_name(item) for layer in layers for item in _listed(layer, list_)}:
        raise ValueError(
            f"--{key}: {kind} is a class, and no setting of one. Set one of its settings by --{key}.NAME VALUE, or take"
            f" it out of the preset by --trainer.{list_}-={kind}; what a file lists is taken out there."
        )


def _parts(key: str) -> tuple[str, str, list[str]]:
    """Return the list, the class and its setting that the name of an option is about; no setting if it is another."""
    keys = key.split(".")
    if len(keys) < 4 or keys[0] != "trainer" or keys[1] not in LISTS or keys[2] in _OF_A_CLASS or "help" in keys:
        return "", "", []
    return keys[1], keys[2], keys[3:]


def _listing(layers: Sequence[Layer], name: str, kind: str) -> list[tuple[Layer, list[Any], int]]:
    """Return where the strongest layer that does so lists ``kind``: the layer, the list, and the place in it."""
    for layer in reversed(layers):
        trainer = layer.tree.get("trainer")
        trainer = trainer if isinstance(trainer, dict) else {}
        found = []
        for key in (name, f"{name}+"):
            if key in trainer:
                trainer[key] = items(trainer[key])
                found += [(layer, trainer[key], at) for at, each in enumerate(trainer[key]) if class_name(each) == kind]
        if found or name in trainer:  # which replaces what the layers below it list
            return found
    return []


def _listed(layer: Layer, name: str) -> list[Any]:
    trainer = layer.tree.get("trainer")
    return [*items(trainer.get(name)), *items(trainer.get(f"{name}+"))] if isinstance(trainer, dict) else []


def class_name(item: Any) -> str:
    """Return the last part of the name of the class that ``item`` of a list names."""
    path = item.get("class_path", "") if isinstance(item, dict) else str(item)
    return path.rpartition(".")[2]


def _as_mapping(item: Any) -> Tree:
    return item if isinstance(item, dict) else {"class_path": item}


def _below_class(setting: Sequence[str]) -> list[str]:
    return [*setting] if setting[0] in _OF_A_CLASS else ["init_args", *setting]


def _put(tree: Tree, keys: Sequence[str], value: Any, classes: Sequence[str]) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(tree.get(key), dict):
            tree[key] = {"class_path": tree[key]} if tree.get(key) else {}
        tree = tree[key]
        if ".".join(keys[:depth]) in classes and keys[depth] not in _OF_A_CLASS:
            tree = tree.setdefault("init_args", {})
    tree[keys[-1]] = value
