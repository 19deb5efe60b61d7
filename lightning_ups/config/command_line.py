"""Read the command line before jsonargparse does: files, preset, and typed changes of lists."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_ups.config import presets
from lightning_ups.config.classes import find_class
from lightning_ups.config.layers import Layer, Tree, preset_layer, read, section
from lightning_ups.config.merge import (
    LISTS,
    MergedList,
    drop_precision,
    kind_of,
    overridden_values,
    parse_value,
    put,
)

_CLASSES = ("model", "data", "optimizer", "lr_scheduler", "trainer.strategy", "trainer.logger", "trainer.profiler")
_SWITCHES = {"false": False, "null": False, "none": False, "true": True}
_LISTS_TEXT = "merged lists"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for."""

    words: Sequence[str]  # for the parser
    texts: Mapping[str, Layer]  # what replaces the file of this name after ``--config``
    given: Sequence[Layer]  # the settings as they were given, the strongest last
    preset: str | None
    notes: Sequence[str]  # lines for the user: the preset, and which of its settings are overridden


def read_command_line(
    words: Sequence[str], *, slots: Mapping[str, type], gpu: tuple[str, tuple[int, int]] | None = None
) -> Request:
    """Read files and preset, and merge lists by class.

    Args:
        words: The command and its options.
        slots: The sections that hold one callback each.
        gpu: Name and compute capability of the GPU of the preset ``auto``. None: the device of this machine.

    Raises:
        ValueError: If a file, the preset or a typed change of a list is wrong.
        OSError: If a file cannot be read.
    """
    command, *rest = words
    sources, named, rest = _split([*_normalized(rest, slots)])
    files = [read(source, command=command) for source in sources]
    options = _typed_layer(rest)
    for layer in [*files, options]:
        _check_sections(layer, slots)
    name, notes = _choose_preset([*files, options], named, gpu)
    preset = preset_layer(name) if name is not None else None
    parsed = [_for_parser(layer, slots) for layer in files]
    lists = {each: MergedList(each, preset) for each in LISTS}
    for merged in lists.values():
        for layer in parsed:
            merged.add_file(layer)
    rest = [word for key, text, spelled in _options(rest) if not _change_list(lists, key, text) for word in spelled]
    typed = replace(options, tree=deepcopy(options.tree))
    for merged in lists.values():
        if merged.typed:
            put(typed.tree, ("trainer", f"{merged.name}+"), merged.typed)
    notes += [*drop_precision(preset, lists["plugins"], [*files, options])]
    if preset is not None:
        notes += [*overridden_values(preset.tree, [*files, options])]
    merged_layer = Layer(name=_LISTS_TEXT, tree=_merged_tree(lists, parsed, slots, has_preset=preset is not None))
    notes += [note for merged in lists.values() for note in merged.notes]
    below = [preset] if preset else []
    texts = dict(zip([*(each.name for each in below), *sources], [*below, *parsed], strict=True))
    if merged_layer.tree:
        texts[_LISTS_TEXT] = merged_layer
    configs = [word for source in texts for word in ("--config", source)]
    given = [*([preset_layer(name)] if name else []), *files, typed]
    return Request(words=[command, *configs, *rest], texts=texts, given=given, preset=name, notes=notes)


def preset_of_device(accelerator: str, gpu: tuple[str, tuple[int, int]] | None = None) -> tuple[str | None, str]:
    """Return the preset for the device that `accelerator` selects, or None if there is none, and the reason."""
    if accelerator != "cpu" and (gpu or torch.cuda.is_available()):
        name, (major, minor) = gpu or (torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        if major < 8:
            return None, f"{name} does not support bfloat16 (compute capability {major}.{minor})"
        return "h100" if major >= 9 else "a100", f"the device is {name}"
    if accelerator in ("auto", "mps") and torch.backends.mps.is_available():
        return None, "the device is an Apple GPU"
    return "cpu", "the device is the CPU"


def unexpected_word(word: str) -> str:
    """Return the error for a word that is neither an option nor its value."""
    bare = word.lstrip("-")
    key, equals, value = bare.partition("=")
    file = value if key in ("c", "config") else "" if equals else word
    if file.endswith((".yaml", ".yml")):
        return f"Unexpected argument {word!r}. Write --config {file}."
    is_option = equals or (word != bare and key[1:] and key[0].isalpha())
    return f"Unexpected argument {word!r}. Write --{bare if is_option else 'KEY VALUE'}."


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield key, value and words of each option; the key of any other word is empty."""
    index = 0
    while index < len(words):
        word, end = words[index], index + 1
        key, equals, value = word.partition("=")
        if not equals and word.startswith("--") and end < len(words) and not words[end].startswith("--"):
            value, end = words[end], end + 1
        yield key.removeprefix("--") if word.startswith("--") else "", value, [*words[index:end]]
        index = end


def _normalized(words: Sequence[str], slots: Mapping[str, type]) -> Iterator[str]:
    """Yield the words as the parser wants them: strategies of ours as classes, ``--manifest false`` written out."""
    for key, value, spelled in _options(["--config" if word == "-c" else word for word in words]):
        if key == "trainer.strategy" and _is_class_of_strategy(value):
            yield f'--trainer.strategy={{"class_path": "{value}"}}'
        elif key in slots and value in _SWITCHES:
            yield f"--{key}.enabled={str(_SWITCHES[value]).lower()}"
        else:
            yield from spelled


def _split(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the files, the preset and the other words: options win over files wherever they stand."""
    sources: list[str] = []
    preset, rest = None, []
    for key, value, spelled in _options(words):
        if key == "config":
            if not value:
                raise ValueError("--config needs a file, as in --config run.yaml.")
            sources.append(value)
        elif key == "preset":
            preset = value
        else:
            if not key and spelled[0].endswith((".yaml", ".yml")):
                raise ValueError(unexpected_word(spelled[0]))
            rest += spelled
    return sources, preset, rest


def _typed_layer(words: Sequence[str]) -> Layer:
    tree: Tree = {}
    for key, text, _ in _options(words):
        keys = key.split(".")
        if key and key != "print_config" and keys[-1] != "help" and _list_of(key) is None:
            put(tree, keys, parse_value(text), _CLASSES)
    return Layer(name="the command line", tree=tree)


def _list_of(key: str) -> str | None:
    """Return the list that ``--key`` changes."""
    names = key.split(".")
    name = names[1].rstrip("+-") if names[0] == "trainer" and len(names) > 1 else ""
    return name if name in LISTS and "help" not in names else None


def _change_list(lists: Mapping[str, MergedList], key: str, text: str) -> bool:
    name = _list_of(key)
    return name is not None and lists[name].add_option(key.removeprefix(f"trainer.{name}"), text)


def _is_class_of_strategy(name: str) -> bool:
    is_registered = name.lower() in ("auto", *StrategyRegistry)
    return not is_registered and "." not in name and find_class(name, [Strategy]) is not None


def _check_sections(layer: Layer, slots: Mapping[str, type]) -> None:
    for key in ("trainer", *slots):
        value = layer.tree.get(key)
        if not (value is None or isinstance(value, dict | str) or (key in slots and isinstance(value, bool))):
            raise ValueError(f"{layer.place(key)}: {key} is {value!r}. It takes settings, NAME: VALUE, without dashes.")


def _for_parser(layer: Layer, slots: Mapping[str, type]) -> Layer:
    """Return a copy of `layer` as the parser wants it; a section without settings is left out."""
    layer = replace(layer, tree=deepcopy(layer.tree))
    layer.tree.pop("preset", None)
    _drop_empty_init_args(layer.tree)
    for slot in slots:
        if isinstance(layer.tree.get(slot), bool):
            layer.tree[slot] = {"enabled": layer.tree[slot]}
    for key in ("trainer", *slots):
        if layer.tree.get(key) is None:
            layer.tree.pop(key, None)
    trainer = section(layer.tree, "trainer")
    if isinstance(strategy := trainer.get("strategy"), str) and _is_class_of_strategy(strategy):
        trainer["strategy"] = {"class_path": strategy}
    return layer


def _drop_empty_init_args(tree: Any) -> None:
    if isinstance(tree, dict):
        if "init_args" in tree and tree["init_args"] is None:
            del tree["init_args"]
        tree = [*tree.values()]
    for inner in tree if isinstance(tree, list) else ():
        _drop_empty_init_args(inner)


def _merged_tree(
    lists: Mapping[str, MergedList], files: Sequence[Layer], slots: Mapping[str, type], *, has_preset: bool
) -> Tree:
    """Return the merged lists, callbacks that have a section of their own moved into it."""
    tree: Tree = {}
    for name, merged in lists.items():
        left = []
        for item in merged.merged():
            slot = next((slot for slot, kind in slots.items() if kind_of(item.spec) is kind), None)
            if slot is None:
                left.append(item.spec)
                continue
            given: Tree = {"enabled": True} if item.is_typed else {}
            given |= section(item.spec, "init_args")
            if not item.is_typed:  # the section wins
                given |= {key: value for layer in files for key, value in section(layer.tree, slot).items()}
            tree[slot] = given
        if left or merged.replaces:
            sign = "" if merged.replaces or has_preset else "+"
            put(tree, ("trainer", f"{name}{sign}"), left or None)
    return tree


def _choose_preset(
    layers: Sequence[Layer], named: str | None, gpu: tuple[str, tuple[int, int]] | None
) -> tuple[str | None, list[str]]:
    """Return the preset, from the command line or else from the last file that names one, and notes about it."""
    in_files = [layer for layer in layers if layer.tree.get("preset")]
    name = named if named is not None else in_files[-1].tree["preset"] if in_files else "none"
    if not name or not isinstance(name, str):
        place = "the command line" if named is not None else in_files[-1].place("preset")
        raise ValueError(f"{place}: preset is {name!r}. It takes one name; `presets` lists them.")
    if name in ("none", "null"):
        return None, []
    if name != presets.AUTO:
        return name, [f"preset {name}: {presets.comment(name)}"]
    accelerators = [section(layer.tree, "trainer").get("accelerator") for layer in layers]
    accelerator = next((each for each in reversed(accelerators) if isinstance(each, str)), "auto")
    name, why = preset_of_device(accelerator, gpu)
    if name is None:
        return None, [f"preset auto: none, because {why}"]
    return name, [f"preset auto: {name}, because {why}"]
