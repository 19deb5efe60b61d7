"""``python -m lightning_ups``: finds the command and loads nothing that it does not need."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from lightning_ups import __version__
from lightning_ups.config.errors import explained
from lightning_ups.config.spelling import suggestion

__all__ = ["main"]


class _Tool(NamedTuple):
    """A command beside fit: its module has ``main(argv)``, or ``show(asked)`` if it takes the options of fit.

    One that has both answers by ``main`` what needs no configuration, and returns None otherwise.
    """

    says: str
    module: str


TRAINER = {
    "fit": "train a LightningModule",
    "validate": "run its validation loop",
    "test": "run its test loop",
    "predict": "run its prediction loop",
}
TOOLS = {  # a command appears when its module exists, and is imported when it is called
    "explain": _Tool("show what a configuration will do, in which order, and what is refused", "commands.explain"),
    "presets": _Tool("list the configurations that the package ships, or print one", "config.presets"),
    "doctor": _Tool("show the machine, its packages, and what can run here", "commands.doctor"),
    "plan": _Tool(
        "predict the memory of a configuration, without a GPU: what fits, and what to change", "commands.plan"
    ),
    "verify": _Tool("check that a configuration trains as the plain model does", "commands.verify"),
    "advise": _Tool("measure which layers would be faster in float8, and by how much", "commands.advise"),
    "export": _Tool("write a checkpoint in another format", "commands.export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 if the user's code failed, 2 if what was asked for is wrong."""
    words = [*sys.argv[1:]] if argv is None else [*argv]
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: a console script would not find the user's modules
    return explained(lambda: _run(words), debug=debug)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"lightning_ups {__version__}")
        return 0
    known = [*TRAINER, *_tools()]
    # Options of fit may come first, as LightningCLI allows; a first word that is none of them must be a command.
    command = next((word for word in words if word in known), None) if words[0].startswith("-") else words[0]
    if command not in known:
        raise ValueError(
            f"There is no command {words[0]!r}. The first word says what to do. {suggestion(words[0], known)}"
        )
    words.remove(command)
    return _call(command, words)


def _call(command: str, words: list[str]) -> int:
    if command in TRAINER:
        return importlib.import_module("lightning_ups.cli").main([command, *words])
    tool = importlib.import_module(f"lightning_ups.{TOOLS[command].module}")
    if hasattr(tool, "main") and (code := tool.main(words)) is not None:  # None: it needs a configuration
        return code
    return importlib.import_module("lightning_ups.cli").show(tool, words)


def _tools() -> Iterator[str]:
    return (name for name, tool in TOOLS.items() if find_spec(f"lightning_ups.{tool.module}") is not None)


def _help() -> str:
    program = "python -m lightning_ups" if os.path.basename(sys.argv[0]) == "__main__.py" else "lightning-ups"
    lines = [f"usage: {program} COMMAND [options]", "", "Training upgrades for PyTorch Lightning.", ""]
    lines += [f"  {name:10}{says}" for name, says in TRAINER.items()]
    lines += ["", *(f"  {name:10}{TOOLS[name].says}" for name in _tools()), ""]
    lines += [
        "Start with:",
        f"  {program} fit --config run.yaml                  train",
        f"  {program} fit --config run.yaml --preset auto    the same, fast on this device",
        f"  {program} explain --config run.yaml              look before",
        "",
        f"`{program} COMMAND --help` lists a command's options; --debug, anywhere, shows whole tracebacks.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
