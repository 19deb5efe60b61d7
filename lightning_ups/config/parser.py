"""The parser of LightningCLI, with prepared files and a readable help, and the callback that saves its result."""

import re
from argparse import SUPPRESS, Action
from collections.abc import Mapping
from contextlib import chdir
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, DefaultHelpFormatter, Namespace, set_dumper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from typing_extensions import override

from lightning_ups.config.classes import is_public
from lightning_ups.config.layers import Layer
from lightning_ups.config.output import note
from lightning_ups.insight.report import give_to_loggers, reserve, run_folder

_TITLES = {  # in the order of the help
    "model": "model (the LightningModule)",
    "data": "data (the LightningDataModule)",
    "optimizer": "optimizer (replaces configure_optimizers; created after sharding)",
    "lr_scheduler": "lr_scheduler (for the section optimizer)",
    "flags": "flags (AccelerationFlags: global settings of torch for speed)",
    "manifest": "manifest (RunManifest: records what took effect, next to the logs)",
    "throughput": "throughput (TokenThroughput: measures throughput and suggests what to change)",
    "trainer": "trainer (arguments of Lightning's Trainer)",
}


class _Help(DefaultHelpFormatter):
    @override
    def _expand_help(self, action: Action) -> str:
        text = super()._expand_help(action).replace("``", "")
        return re.sub(r"(?<=known subclasses: )[\w., ]+", lambda names: _public_names(names[0]), text)


def _public_names(paths: str) -> str:
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths.split(", ") if is_public(path)))


class _Dumper(yaml.SafeDumper):
    """Writes an Enum as its value: the default of Lightning's Timer is one, although its type is a string."""


_Dumper.add_multi_representer(Enum, lambda dumper, choice: dumper.represent_data(choice.value))


def _dump(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class UpsParser(LightningArgumentParser):
    """Read prepared text in place of some files, and sort the help by importance."""

    texts: Mapping[str, Layer] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        set_dumper("yaml", _dump)  # global, because nested parsers are of other classes
        super().__init__(*args, **options)

    @override
    def format_help(self, *args: Any, **options: Any) -> str:
        for action in self._actions:
            if any(option.endswith(".help") for option in action.option_strings):
                action.help = SUPPRESS  # the description mentions them
        for key, group in (self.groups or {}).items():
            group.title = _TITLES.get(key, group.title)
        rank = {title: index for index, title in enumerate(_TITLES.values())}
        first, rest = self._action_groups[:2], self._action_groups[2:]
        self._action_groups = [*first, *sorted(rest, key=lambda group: rank.get(str(group.title), len(rank)))]
        return super().format_help(*args, **options)


class ReadConfig(ActionConfigFile):
    """Read a configuration file, or the text in ``UpsParser.texts`` that replaces it."""

    @override
    def __call__(self, parser: Any, cfg: Namespace, values: Any, option_string: str | None = None) -> None:
        layer = parser.texts.get(values)
        if layer is None:
            super().__call__(parser, cfg, values, option_string)
            return
        with chdir(layer.folder or "."):  # paths in a file are relative to its folder
            self.apply_config(parser, cfg, self.dest, layer.text)


class SavedConfig(SaveConfigCallback):
    """Write ``config.yaml`` next to the logs, or into the root directory, and never overwrite a file.

    A file of that name may be another run's, or the one that the user wrote. ``path`` says where it is.
    """

    path: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_folder(trainer)  # a collective: on every rank
        if self.already_saved or self.overwrite or not self.save_to_log_dir or "://" in folder:
            super().setup(trainer, pl_module, stage)
            return
        self.already_saved = True
        if not trainer.is_global_zero:
            return
        name = Path(self.config_filename)
        try:
            self.path = reserve(Path(folder), name=name.stem, ending=name.suffix)
        except OSError as error:
            if stage == "fit":
                raise OSError(
                    f"{folder} is not writable ({error.strerror}), but logs, checkpoints or {name} are written there."
                    " Choose another trainer.default_root_dir."
                ) from error
            note(f"{name} is not saved: {folder} is not writable ({error.strerror}).")
            return
        self.parser.save(self.config, str(self.path), skip_none=False, overwrite=True, multifile=self.multifile)
        self.save_config(trainer, pl_module, stage)
        give_to_loggers(trainer, self.path)
