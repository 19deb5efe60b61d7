"""The parser of the command line: reads files as they were changed before, and has a help that reads well."""

import re
from argparse import SUPPRESS, Action
from collections.abc import Mapping
from contextlib import chdir
from enum import Enum
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, DefaultHelpFormatter, Namespace, set_dumper
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_ups.config.diagnosis import offered
from lightning_ups.config.layers import Layer

__all__ = ["ReadConfig", "UpsParser"]

_TITLES = {  # in the order in which a reader needs them
    "model": "model (the LightningModule)",
    "data": "data (the LightningDataModule)",
    "optimizer": "optimizer (made from the module's parameters, after sharding, in place of configure_optimizers)",
    "lr_scheduler": "lr_scheduler (goes with the section optimizer)",
    "flags": "flags (AccelerationFlags: the process-wide switches that decide speed)",
    "manifest": "manifest (RunManifest: what really took effect, kept beside the logs)",
    "throughput": "throughput (TokenThroughput: how fast it is, where the time goes, what to change first)",
    "trainer": "trainer (what Lightning's Trainer takes)",
}


class _Help(DefaultHelpFormatter):
    @override
    def _expand_help(self, action: Action) -> str:
        # Docstrings mark code by two backticks, which a terminal does not need.
        text = super()._expand_help(action).replace("``", "")
        return re.sub(r"(?<=known subclasses: )[\w., ]+", lambda names: _names(names[0]), text)


def _names(paths: str) -> str:
    # Without the packages: a class of Lightning's, torch's or ours is found by its name.
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths.split(", ") if offered(path)))


class _Dumper(yaml.SafeDumper):
    """Writes a choice as its value: Lightning's Timer has one as the default of a string, which jsonargparse leaves."""


_Dumper.add_multi_representer(Enum, lambda dumper, choice: dumper.represent_data(choice.value))


def _dumped(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class UpsParser(LightningArgumentParser):
    """Takes some files as they were changed before, and orders its help by what a reader needs first."""

    texts: Mapping[str, Layer] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        set_dumper("yaml", _dumped)  # nested parsers are of other classes
        super().__init__(*args, **options)

    @override
    def format_help(self, *args: Any, **options: Any) -> str:
        for action in self._actions:
            if any(option.endswith(".help") for option in action.option_strings):
                action.help = SUPPRESS  # one line below says that they are there
        for key, group in (self.groups or {}).items():
            group.title = _TITLES.get(key, group.title)
        rank = {title: index for index, title in enumerate(_TITLES.values())}
        first, rest = self._action_groups[:2], self._action_groups[2:]
        self._action_groups = [*first, *sorted(rest, key=lambda group: rank.get(str(group.title), len(rank)))]
        return super().format_help(*args, **options)


class ReadConfig(ActionConfigFile):
    """Reads a configuration file, or what stands for it in ``UpsParser.texts``."""

    @override
    def __call__(self, parser: Any, cfg: Namespace, values: Any, option_string: str | None = None) -> None:
        layer = parser.texts.get(values)
        if layer is None:
            super().__call__(parser, cfg, values, option_string)
            return
        with chdir(layer.folder or "."):  # its paths are relative to where it lies
            self.apply_config(parser, cfg, self.dest, layer.text)
