"""A command line, read before it is parsed: its layers, its preset, and what the user overrides of that."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_ups.config import presets
from lightning_ups.config.diagnosis import find_class, stray
from lightning_ups.config.layers import LISTS, Layer, Tree, addressed, items, option_layer, options, preset_layer, read
from lightning_ups.config.merge import over_preset
from lightning_ups.config.spelling import nearest

__all__ = ["Request", "ask", "environment_layers", "preset_of_device", "stray_variables"]

_CLASSES = ("model", "data", "optimizer", "lr_scheduler", "trainer.strategy", "trainer.logger", "trainer.profiler")
_SLOTS = (CheckpointIO, ClusterEnvironment, LayerSync)
_BASES = (Callback, Precision, *_SLOTS, Strategy, Logger)
_WITH_LISTS = tuple(f"{name}{sign}" for name in LISTS for sign in ("", "+", "-"))
_CALLBACKS = ("trainer.callbacks", "trainer.callbacks+")
_OFF = {"false": False, "null": False, "none": False, "true": True}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for.

    Args:
        words: The command line for the parser, the preset in it.
        texts: What stands for a word after ``--config`` instead of the file of that name.
        given: What the user says, the preset first and the strongest last.
        preset: The preset, if there is one.
        said: What the user should know: which preset was chosen, and what of it is overridden.
    """

    words: Sequence[str]
    texts: Mapping[str, Layer] = field(default_factory=dict)
    given: Sequence[Layer] = ()
    preset: str | None = None
    said: Sequence[str] = ()


def ask(words: Sequence[str], *, slots: Mapping[str, type]) -> Request:
    """Return what ``words`` ask for, the command first among them.

    Args:
        words: The command line.
        slots: The keys of callbacks that have a section of their own, and their classes.

    Raises:
        ValueError: If a file is no configuration, there is no such preset, or it lacks what is to be taken away, or
            what an option is about.
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be read.
    """
    command, *rest = words
    sources, named, kept = _sorted_out(_in_sections([*_spelled_out(rest, slots)], slots))
    alone = [spelled[0] for key, _, spelled in options(kept) if not key and spelled[0].endswith((".yaml", ".yml"))]
    attached = [word for word in alone if word.startswith("-c=")]  # which the parser would read after what is typed
    if attached or (alone and not sources):  # said now, and not when all that the file would give is missed
        raise ValueError(stray((attached or alone)[0]))
    files = {source: read(source, command=command) for source in sources}
    typed, _ = option_layer(kept, classes=_CLASSES)
    for layer in (*files.values(), typed):
        _check_sections(layer, slots)
        _check_init_args(layer.tree, (), layer)
    name, said = _preset([*files.values(), typed], named)
    preset = preset_layer(name) if name is not None else None
    kept, changed = addressed(kept, [*files.values()], preset=preset)
    files = dict(zip(files, changed, strict=True))
    tidied = {source: _tidied(layer, slots) for source, layer in files.items()}
    typed, spared = option_layer(kept, classes=_CLASSES)
    given = (*files.values(), typed)
    if preset is None:
        _refuse_removal(given)
        same = {source for source, layer in files.items() if layer.whole and layer.tree == tidied[source].tree}
        texts = {source: layer for source, layer in tidied.items() if source not in same}
        return Request(words=[command, *_configs(sources), *kept], texts=texts, given=given, said=said)
    layers, overridden = over_preset(
        preset, [*tidied.values(), typed], find_class=_find, precision=Precision, slots=_SLOTS
    )
    base, *above, lists = layers
    texts = {base.name: base, **dict(zip(tidied, above, strict=True))}
    last = []
    if tree := {key: value for key, value in lists.trainer.items() if key.removesuffix("+") in LISTS}:
        texts[lists.name] = replace(lists, tree={"trainer": tree})
        last = [lists.name]
    return Request(
        words=[command, *_configs([base.name, *sources]), *spared, *_configs(last)],
        texts=texts,
        given=(preset, *given),
        preset=name,
        said=[*said, *overridden],
    )


def environment_layers(variables: Mapping[str, str], *, command: str) -> list[Layer]:
    """Return what the environment says, a layer for each variable that is set.

    Args:
        variables: The variable of each key.
        command: For which a file is read.

    Raises:
        ValueError: If a variable names a file that is no configuration.
        FileNotFoundError: If it names a file that is not there.
        OSError: If it names a file that cannot be read.
    """
    layers = []
    for key, variable in variables.items():
        if (text := os.environ.get(variable)) is None:
            continue
        try:
            layer = (
                read(text, command=command)
                if key == "config"
                else option_layer([f"--{key}={text}"], classes=_CLASSES)[0]
            )
        except (ValueError, OSError) as error:
            raise type(error)(f"{variable}: {error}") from error
        name = f"{variable}: {layer.name}" if key == "config" else variable
        layers.append(replace(layer, name=name))
    return layers


def stray_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable of the environment that is none of ``variables``, though it looks like one.

    Args:
        variables: The variable of each key.
    """
    names = {*variables.values()}
    prefix = variables.get("config", "").removesuffix("CONFIG")
    section = "__" in prefix  # of a command: nothing else has variables that begin so
    for name in sorted(os.environ):
        rest = name.removeprefix(prefix)
        if not prefix or rest == name or name in names or not (section or "__" in rest):
            continue
        above = max((known for known in names if name.startswith(f"{known}__")), key=len, default=None)
        near = nearest(name, names, cutoff=0.9)
        if section or above or near:
            cure = f"Did you mean {near!r}?" if near else "Unset it."
            if above and not near:
                cure = f"Settings of a class stand with it in {above}, as YAML."
            yield f"{name} is set, and no setting has that variable. It is passed over. {cure}"


def preset_of_device(accelerator: str) -> tuple[str | None, str]:
    """Return the preset for the device that a run with ``accelerator`` will use here, if one fits, and why."""
    if accelerator != "cpu" and torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if major < 8:
            return None, f"{name} has no bfloat16 (compute capability {major}.{minor})"
        return "h100" if major >= 9 else "a100", f"the device is {name}"
    if accelerator in ("auto", "mps") and torch.backends.mps.is_available():
        return None, "the device is Apple's"
    return "cpu", "the run is on the CPU"


def _spelled_out(words: Sequence[str], slots: Mapping[str, type]) -> Iterator[str]:
    """Yield the words as the parser wants them."""
    words = ["--config" if word == "-c" else word for word in words]
    for key, value, spelled in options(words):
        if key == "trainer.strategy" and _is_class_of_strategy(value):
            yield f'--trainer.strategy={{"class_path": "{value}"}}'
        elif key in slots and value in _OFF:
            yield f"--{key}.enabled={str(_OFF[value]).lower()}"
        else:
            yield from spelled


def _in_sections(words: Sequence[str], slots: Mapping[str, type]) -> Iterator[str]:
    """Yield the words, callbacks that have a section of their own moved into it, as is done with those of a file."""
    section = None  # of the callback that was added last
    for key, text, spelled in options(words):
        if key in _CALLBACKS:
            layer, _ = option_layer(spelled, classes=_CLASSES)
            _check_init_args(layer.tree, (), layer)
            listed = [(item, _slot_of(item, slots)) for item in layer.trainer[key.removeprefix("trainer.")]]
            section = listed[-1][1] if listed else None
            yield from _moved(key, listed) if any(slot for _, slot in listed) else spelled
        elif section is not None and _sets_the_last(key):
            setting = key.removeprefix("trainer.callbacks.").removeprefix("init_args.")
            yield f"--{section}.{setting}={text}"
        else:
            yield from spelled


def _moved(key: str, listed: Sequence[tuple[Any, str | None]]) -> Iterator[str]:
    rest = [item for item, slot in listed if slot is None]
    if rest or key == "trainer.callbacks":  # which replaces the list
        yield f"--{key}={json.dumps(rest)}"
    for item, slot in listed:
        if slot is not None:
            yield f"--{slot}.enabled=true"
            for name, value in _init_args(item).items():
                yield f"--{slot}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def _sets_the_last(key: str) -> bool:
    # Of a class that is named, it is about one that is listed elsewhere.
    setting = key.removeprefix("trainer.callbacks.")
    return setting != key and setting != "help" and not setting[:1].isupper()


def _slot_of(item: Any, slots: Mapping[str, type]) -> str | None:
    """Return the section of the callback that ``item`` of a list names, if it has one."""
    kind = _find(item.get("class_path") if isinstance(item, dict) else item)
    return next((slot for slot, of in slots.items() if of is kind), None)


def _init_args(item: Any) -> Tree:
    return (item.get("init_args") or {}) if isinstance(item, dict) else {}


def _sorted_out(words: Iterator[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the files, the preset and the other words: what is typed wins over files wherever it stands."""
    sources: list[str] = []
    named, kept = None, []
    for key, value, spelled in options([*words]):
        if key == "config":
            if not value:
                raise ValueError("--config is given without a file. Write --config FILE, as in --config run.yaml.")
            sources.append(value)
        elif key == "preset":
            named = value
        else:
            kept += spelled
    return sources, named, kept


def _configs(sources: Sequence[str]) -> list[str]:
    return [word for source in sources for word in ("--config", source)]


def _is_class_of_strategy(name: str) -> bool:
    return (
        name.lower() not in ("auto", *StrategyRegistry) and "." not in name and find_class(name, [Strategy]) is not None
    )


def _tidied(layer: Layer, slots: Mapping[str, type]) -> Layer:
    """Return ``layer`` as the parser wants it: ``manifest: false`` written out, callbacks of a slot in it."""
    layer = replace(layer, tree=deepcopy(layer.tree))
    layer.tree.pop("preset", None)
    _without_empty(layer.tree)
    for slot in slots:
        if isinstance(layer.tree.get(slot), bool):
            layer.tree[slot] = {"enabled": layer.tree[slot]}
    for section in ("trainer", *slots):
        if layer.tree.get(section) is None:  # as when all below it is commented out
            layer.tree.pop(section, None)
    trainer = layer.tree.get("trainer")
    if not isinstance(trainer, dict):
        return layer
    if isinstance(strategy := trainer.get("strategy"), str) and _is_class_of_strategy(strategy):
        trainer["strategy"] = {"class_path": strategy}
    for key in ("callbacks", "callbacks+"):
        for item in items(trainer.get(key)):
            if (slot := _slot_of(item, slots)) is not None:
                trainer[key] = [other for other in items(trainer[key]) if other is not item]
                layer.tree[slot] = _init_args(item) | (layer.tree.get(slot) or {})
    return layer


def _without_empty(tree: Any) -> None:
    """Take out ``init_args`` below which nothing is left, as when all of it is commented out."""
    if isinstance(tree, dict):
        if "init_args" in tree and tree["init_args"] is None:
            del tree["init_args"]
        tree = [*tree.values()]
    for inner in tree if isinstance(tree, list) else ():
        _without_empty(inner)


def _check_sections(layer: Layer, slots: Collection[str]) -> None:
    """Raise ValueError if a section holds no settings, though text may be a file's name, or a list what is no class."""
    for key in ("trainer", *slots):
        value = layer.tree.get(key)
        if not (value is None or isinstance(value, dict | str) or (key in slots and isinstance(value, bool))):
            raise ValueError(
                f"{layer.place(key)}: {key} is {value!r}. It holds settings, each with its name."
                " Write them below it, NAME: VALUE, without dashes."
            )
    trainer = layer.tree.get("trainer")
    if not isinstance(trainer, dict):
        return
    for key in _WITH_LISTS:
        for index, item in enumerate(items(trainer.get(key))):
            if not isinstance(item, dict | str):
                raise ValueError(
                    f"{layer.place('trainer', key, index)}: trainer.{key}[{index}] is {item!r}. It takes a class."
                    " Give one by its name or by class_path, or take this out of the list."
                )


def _check_init_args(tree: Any, keys: tuple[str | int, ...], layer: Layer) -> None:
    """Raise ValueError if what stands for the settings of a class holds no settings."""
    if isinstance(tree, dict):
        settings = tree.get("init_args")
        # A dictionary of the user's may have such a key, too.
        of = tree.get("class_path", "the class")
        is_class = isinstance(tree.get("class_path"), str) or keys in (("model",), ("data",), ("trainer",))
        if is_class and settings is not None and not isinstance(settings, dict):
            raise ValueError(
                f"{layer.place(*keys, 'init_args')}: init_args is {settings!r}. It holds the settings of {of},"
                " each with its name. Write it as a mapping, NAME: VALUE, without dashes."
            )
        for key, value in tree.items():
            _check_init_args(value, (*keys, key), layer)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            _check_init_args(value, (*keys, index), layer)


def _find(name: Any) -> type | None:
    return find_class(name, _BASES) if isinstance(name, str) else None


def _preset(layers: Sequence[Layer], named: str | None) -> tuple[str | None, list[str]]:
    """Return the preset, ``named`` on the command line or else by the last file that names one, and what to say."""
    in_files = [layer for layer in layers if layer.tree.get("preset")]
    name = named if named is not None else in_files[-1].tree["preset"] if in_files else "none"
    if not name or not isinstance(name, str):
        place = "the command line" if named is not None else in_files[-1].place("preset")
        raise ValueError(
            f"{place}: preset is {name!r}. It is the name of one of the configurations that the package ships."
            " Give one name; `presets` lists them."
        )
    if name in ("none", "null"):
        return None, []
    if name != presets.AUTO:
        return name, [f"preset {name}: {presets.comment(name)}"]
    accelerators = [
        layer.tree["trainer"].get("accelerator") for layer in layers if isinstance(layer.tree.get("trainer"), dict)
    ]
    name, why = preset_of_device(next((each for each in reversed(accelerators) if isinstance(each, str)), "auto"))
    if name is None:
        return None, [f"preset auto: none, since {why}; Lightning's defaults stay"]
    return name, [f"preset auto: {name}, since {why}"]


def _refuse_removal(layers: Sequence[Layer]) -> None:
    for layer in layers:
        trainer = layer.tree.get("trainer")
        for name in LISTS:
            if isinstance(trainer, dict) and f"{name}-" in trainer:
                raise ValueError(
                    f"{layer.place('trainer', f'{name}-')}: {name}- is given without a preset."
                    " It takes classes out of a preset's list, and there is none. Remove it, or add --preset NAME."
                )
