"""The run that `ablate` and `tune` start from: its words, its preset, and what the user's files set."""

import os
import re
import sys
import sysconfig
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getsourcefile
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml
from lightning.pytorch.plugins import Precision

from lightning_ups._compat.environment import host, relevant_variables, usable_cores, versions
from lightning_ups.config import presets
from lightning_ups.config.classes import class_name
from lightning_ups.config.command_line import read_command_line
from lightning_ups.config.layers import Layer, items, section
from lightning_ups.config.merge import kind_of
from lightning_ups.config.output import note
from lightning_ups.config.requested_run import RequestedRun
from lightning_ups.config.suggestions import parse_own_options
from lightning_ups.insight.report import reserve
from lightning_ups.insight.tune import (
    Configuration,
    Store,
    Tree,
    default_folder,
    digest,
    digest_of_files,
    leaves,
    shape_of,
    visible_devices,
)

_AFFECTS_SPEED = re.compile(r"NUM_THREADS$|^(DNNL|ONEDNN|MALLOC)_|^LD_PRELOAD$")  # beside `relevant_variables`
# Which of equal GPUs a search uses, and where caches are, changes no result.
_OF_A_JOB = re.compile(r"SLURM_|PL_GLOBAL_SEED$|.*RANK$|.*WORLD_SIZE$|CUDA_VISIBLE_DEVICES$|.*CACHE_DIR$")
Parse = Callable[[Sequence[str]], RequestedRun]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A fragment with a name."""

    name: str
    tree: Tree


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """The user's run.

    Args:
        words: The options of fit, without the preset.
        preset: The name of its preset, found by the device for ``auto``; None: there is none.
        requested: The run as configured.
        layers: The settings of the user's files and options, without those of the preset.
        identity: What a measurement depends on, beside the words.
    """

    words: Sequence[str]
    preset: str | None
    requested: RequestedRun
    layers: Sequence[Layer]
    identity: Tree

    def configuration(self, *fragments: str, preset: str | None) -> Configuration:
        """Return the run with fragments and a preset; None: no preset."""
        # A trial sees only its own GPUs, which have other indices there.
        count = ["--trainer.devices", str(self.requested.run.num_devices)] if self._indices else []
        return Configuration(words=[*self.words, *count], preset=preset or "none", fragments=fragments)

    @property
    def _indices(self) -> list[int]:
        """The indices of the GPUs that the run asks for; empty: it asks for a number."""
        given = self.requested.config["trainer"]["devices"]
        if isinstance(given, str) and "," in given:
            given = [index for index in given.split(",") if index.strip()]
        return [int(index) for index in given] if isinstance(given, list | tuple) else []

    @property
    def explicit(self) -> dict[str, Any]:
        """The user's settings by dotted key; classes in lists by ``callbacks.NAME`` and ``plugins.NAME``."""
        found: dict[str, Any] = {}
        for layer in self.layers:
            for key, value in leaves(layer.tree):
                name = key.removeprefix("trainer.").rstrip("+-")
                if name in ("callbacks", "plugins"):
                    found |= {f"{name}.{class_name(item)}": item for item in items(value)}
                elif isinstance(value, dict):  # a class
                    found[key] = value["class_path"]
                    found |= {f"{key}.{inner}": each for inner, each in leaves(value.get("init_args") or {})}
                else:
                    found[key.replace(".init_args.", ".")] = value
        return found

    @property
    def typed(self) -> list[str]:
        """The user's settings that are options of the command line, by dotted key."""
        layers = [layer for layer in self.layers if layer.name == "the command line"]
        return [key.replace(".init_args.", ".") for layer in layers for key, _ in leaves(layer.tree)]

    @property
    def sets_precision(self) -> bool:
        """Whether the user chose the precision."""
        return any(
            section(layer.tree, "trainer").get("precision") is not None
            or any(_is_precision(item) for key in ("plugins", "plugins+") for item in _listed(layer.tree, key))
            for layer in self.layers
        )

    @property
    def own_parts(self) -> list[str]:
        """The parts of this package that the user's settings name."""
        lists = (item for key, item in self.explicit.items() if key.startswith(("callbacks.", "plugins.")))
        parts = [kind.__name__ for kind in map(kind_of, lists) if kind and kind.__module__.startswith("lightning_ups.")]
        strategy = self.requested.run.strategy
        return parts + ([strategy.name] if strategy.ours and "trainer.strategy" in self.explicit else [])

    @property
    def workers(self) -> int:
        """The loader workers of a process, as far as the datamodule says."""
        count = section(self.requested.config, "data", "init_args").get("num_workers")
        return count if type(count) is int else 0

    def devices(self, count: int | None) -> tuple[list[str], int]:
        """Return the names of the GPUs that trials may use, at most ``count``, and how many one trial needs.

        Raises:
            ValueError: If a trial needs more, or the run has several nodes.
        """
        run = self.requested.run
        if run.num_nodes > 1:
            raise ValueError(
                f"trainer.num_nodes is {run.num_nodes}, but trials run on one machine. Give --trainer.num_nodes 1."
            )
        if run.accelerator != "cuda" or not torch.cuda.is_available():
            return [], run.num_devices
        every = visible_devices(torch.cuda.device_count())
        asked = [every[index] for index in self._indices if index < len(every)]
        found = [*asked, *(name for name in every if name not in asked)][: count or run.num_devices]
        if len(found) < run.num_devices:
            raise ValueError(
                f"The run needs {run.num_devices} GPUs, and {len(found)} may be used."
                f" Give --trainer.devices {len(found)}, or more --devices."
            )
        return found, run.num_devices


def undisturbed(names: Sequence[str], per_trial: int, *, workers: int) -> list[str]:
    """Return the GPUs for as many trials at once as have cores of their own for each process and its loader workers."""
    at_once = max(1, usable_cores() // (per_trial * (1 + max(workers, 1))))
    return [*names[: at_once * per_trial]]


def base_of(parse: Parse, words: Sequence[str]) -> BaseRun:
    """Return the run that ``words``, options of fit, describe."""
    requested = parse(words)
    given = read_command_line(["fit", *words], slots={}).given
    layers = [layer for layer in given if not layer.name.startswith("preset ")]
    module, data = requested.run.module, requested.config.get("data") or {}
    kinds = [type(module), kind_of(data), *map(type, requested.run.callbacks)]
    return BaseRun(
        words=_without_preset(words),
        preset=requested.preset,
        requested=requested,
        layers=layers,
        identity={
            "files": digest([layer.tree for layer in layers]),
            "model": shape_of(module),
            "source": digest_of_files([*(file for kind in kinds if (file := _source(kind))), *_own_modules(words)]),
            "data": digest(data),
            "folder": str(Path.cwd()),  # of relative paths
            "environment": _variables(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
            "versions": versions(),
        },
    )


def parts_of_preset(base: BaseRun) -> Iterator[Part]:
    """Yield each part of the preset that no setting of the user replaces."""
    explicit = base.explicit
    tree = yaml.safe_load(presets.text(base.preset)) if base.preset else {}
    trainer = dict(section(tree, "trainer"))
    trainer.pop("accelerator", None)  # where it runs is not an optimization
    for key in ("plugins", "callbacks"):
        for item in items(trainer.pop(key, None)):
            if f"{key}.{class_name(item)}" not in explicit and not (base.sets_precision and _is_precision(item)):
                yield Part(name=class_name(item), tree={"trainer": {f"{key}+": [item]}})
    for name, settings in {"trainer": trainer, **{key: tree[key] for key in tree if key != "trainer"}}.items():
        for key, value in settings.items():
            if f"{name}.{key}" not in explicit and not (key == "precision" and base.sets_precision):
                yield Part(name=f"{name}.{key}", tree={name: {key: value}})


def accelerator_of_preset(base: BaseRun) -> Tree:
    """Return the fragment that keeps a run on the device that its preset chooses."""
    tree = yaml.safe_load(presets.text(base.preset)) if base.preset else {}
    accelerator = section(tree, "trainer").get("accelerator")
    kept = accelerator is not None and "trainer.accelerator" not in base.explicit
    return {"trainer": {"accelerator": accelerator}} if kept else {}


def add_common_options(parser: ArgumentParser, *, seconds: float, output: str) -> None:
    """Add the options that `ablate` and `tune` share."""
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of measuring in a trial at most; {seconds:g}")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a trial is killed; 300")
    parser.add_argument(
        "--output", type=Path, default=Path(output), help=f"name of the files, without ending; {output}"
    )
    parser.add_argument("--store", type=Path, help="folder of measured results; one in the user's cache")
    parser.add_argument("--fresh", action="store_true", help="measure again what the store has, and replace it")


def parsed(parser: ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a command, and the words that are options of fit.

    Raises:
        ValueError: If a number is not positive, or ``--output`` cannot be written.
    """
    known, rest = parse_own_options(parser, argv)
    own = vars(known)
    for name, value in own.items():
        if type(value) in (int, float) and not 0 < value < inf:
            default = parser.get_default(name) or 1
            raise ValueError(f"--{name} {value:g} is not a positive number. Give one, such as --{name} {default:g}.")
    if (output := own.get("output")) is not None:
        check_file(output, option="--output")
    return own, rest


def check_file(file: Path, *, option: str) -> None:
    """Check, before a trial costs time, that ``file`` can be written.

    Raises:
        ValueError: If not.
    """
    folder = next(each for each in file.absolute().parents if each.exists())  # others are created
    try:
        with TemporaryFile(dir=folder):
            pass
        if file.exists():
            file.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {file} cannot be written: {error.strerror}.") from error


def store_of(folder: Path | None, *, fresh: bool) -> Store | None:
    """Return the store of results; None: the user's cache cannot be written, and nothing is kept.

    Raises:
        ValueError: If ``folder`` is given and cannot be written.
    """
    found = folder or default_folder()
    try:
        check_file(found / "results.jsonl", option="--store")
    except ValueError as error:
        if folder is not None:
            raise
        note(f"Results are not kept: {error}")
        return None
    return Store(found, is_fresh=fresh)


def write_new(output: Path, ending: str, text: str) -> Path:
    """Write ``text`` to a new file and return its path: NAME, NAME-2, and so on."""
    path = reserve(output.parent, name=output.name, ending=ending)
    path.write_text(text, encoding="utf-8")
    return path


def _cpu() -> str:
    machine = host()
    return f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores"


def _variables() -> dict[str, str]:
    also = {name: value for name, value in os.environ.items() if _AFFECTS_SPEED.search(name)}
    return {name: value for name, value in sorted((relevant_variables() | also).items()) if not _OF_A_JOB.match(name)}


def _own_modules(words: Sequence[str]) -> list[str]:
    """Return the files of imported modules in the working directory, or beside a file of settings."""
    files = [word.removeprefix("--config=") for word in words if word.endswith((".yaml", ".yml"))]
    folders = [Path.cwd(), *(Path(file).absolute().parent for file in files)]
    ours, standard = (
        __name__.partition(".")[0],
        sysconfig.get_path("stdlib"),
    )  # versions tell these, and what is installed
    found = set[Path]()
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == ours or (file := getattr(module, "__file__", None)) is None:
            continue
        path = Path(file)
        if not path.is_relative_to(standard) and not {"site-packages", "dist-packages"}.intersection(path.parts):
            found |= {path for folder in folders if path.is_relative_to(folder)}
    return [str(path) for path in sorted(found)]


def _source(kind: Any) -> str | None:
    try:
        return getsourcefile(kind)
    except TypeError:  # built in, or defined without a file
        return None


def _without_preset(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skips = False
    for word in words:
        if skips:
            skips = False
        elif word == "--preset":
            skips = True
        elif not word.startswith("--preset="):
            kept.append(word)
    return kept


def _is_precision(item: Any) -> bool:
    kind = kind_of(item)
    return kind is not None and issubclass(kind, Precision)


def _listed(tree: Tree, key: str) -> list[Any]:
    return items(section(tree, "trainer").get(key))
