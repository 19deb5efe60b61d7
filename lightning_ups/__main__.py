"""Run ``python -m lightning_ups COMMAND``; only what the command needs is imported."""

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

from lightning_ups import __version__
from lightning_ups.config.errors import broken_package, cure_of_broken, report_errors
from lightning_ups.config.suggestions import check_config, unknown_command


class _Tool(NamedTuple):
    """A command of this package.

    Its module has ``main(argv)``, or ``show(requested)`` if it takes the options of fit. If it has both, ``main``
    returns None to ask for ``show``.
    """

    description: str
    module: str


TRAINER = {
    "fit": "train a LightningModule",
    "validate": "run its validation loop",
    "test": "run its test loop",
    "predict": "run its prediction loop",
}
TOOLS = {
    "explain": _Tool("show what a configuration does, in which order, and what is refused", "commands.explain"),
    "presets": _Tool("list the presets, or print one", "config.presets"),
    "recipes": _Tool("list complete configurations to start from, or print one", "commands.starting.recipes"),
    "init": _Tool("copy a recipe to a file of your own", "commands.starting.init"),
    "doctor": _Tool("show the hardware, the installed packages, and what can run here", "commands.doctor"),
    "migrate": _Tool("convert settings of DeepSpeed, Accelerate or FSDP to YAML", "commands.starting.migrate"),
    "plan": _Tool("predict the memory of a configuration without a GPU, and what to change", "commands.plan"),
    "verify": _Tool("check that a configuration trains as the plain model does", "commands.verify"),
    "advise": _Tool("measure which layers would be faster in float8, and by how much", "commands.advise"),
    "tune": _Tool("find the fastest settings that fit in memory and train the same", "commands.tune"),
    "ablate": _Tool("measure what each part of a configuration gains", "commands.ablate"),
    "diagnose": _Tool("find out by experiments what slows a run down, and try the fix", "commands.diagnose"),
    "compare": _Tool("compare runs: what differed, and what effect it had, significant or noise", "commands.compare"),
    "gate": _Tool("exit code for CI: a run at most so much slower than another, its loss in a band", "commands.gate"),
    "export": _Tool("convert a checkpoint to another format", "commands.export"),
    "tokenize": _Tool("turn files of documents into tokens to train on", "commands.tokenize"),
    "inspect": _Tool("show what a folder of tokens has, and how well it packs", "commands.inspect"),
}
_INTERNAL = {"measured_fit": _Tool("", "commands.measured_fit")}  # what other commands run
_WITHOUT_RUN = ("presets", "recipes", "init", "migrate", "doctor", "export", "compare", "gate", "tokenize", "inspect")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0; 1 if the user's code failed; 2 if the request is wrong."""
    words = [*sys.argv[1:]] if argv is None else [*argv]
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    for name in ("torchao", "torch.utils._pytree"):  # transformers and peft import torchao
        logging.getLogger(name).addFilter(_is_for_users)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a console script would not find the user's modules
    return report_errors(lambda: _run(words), debug=debug)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Return False for the lines of torchao's import: extensions for other machines, and its use of torch."""
    return not re.search(r"Failed to load .*_C|register_constant\(\).* is deprecated", record.getMessage())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"lightning_ups {__version__}")
        return 0
    known = [*TRAINER, *TOOLS, *_INTERNAL]
    # Options may precede the command, as in LightningCLI.
    command = next((word for word in words if word in known), None) if words[0].startswith("-") else words[0]
    if command not in known:
        raise ValueError(unknown_command(words, [*TRAINER, *TOOLS]))
    words.remove(command)
    if command not in _WITHOUT_RUN:
        for option, value in pairwise([*words, ""]):
            name = option.removeprefix("--config=") if "=" in option else value
            is_config = option in ("-c", "--config") or option.startswith("--config=")
            if is_config and name and not name.startswith("--"):
                check_config(name)  # here, since what reads the file takes seconds to import
    if command in TRAINER:
        return _load("cli").main([command, *words])
    tool = _load((TOOLS | _INTERNAL)[command].module)
    if hasattr(tool, "main") and (code := tool.main(words)) is not None:
        return code
    return _load("cli").show(tool, words)


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"lightning_ups.{module}")
    except Exception as error:
        package = broken_package(traceback.format_exc())
        if package is None:
            raise
        raise ImportError(
            f"{package} does not load: {type(error).__name__}: {error}. To change that: {cure_of_broken(package)}."
        ) from error


def _help() -> str:
    program = "python -m lightning_ups" if os.path.basename(sys.argv[0]) == "__main__.py" else "lightning-ups"
    lines = [f"usage: {program} COMMAND [options]", "", "Training upgrades for PyTorch Lightning.", ""]
    lines += [f"  {name:10}{description}" for name, description in TRAINER.items()]
    lines += ["", *(f"  {name:10}{tool.description}" for name, tool in TOOLS.items()), ""]
    lines += [
        "Start with:",
        f"  {program} fit --config run.yaml                  train",
        f"  {program} fit --config run.yaml --preset auto    the same, fast on this device",
        f"  {program} explain --config run.yaml              inspect a run before it starts",
        "",
        f"`{program} COMMAND --help` lists the options of a command; --debug shows tracebacks.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
