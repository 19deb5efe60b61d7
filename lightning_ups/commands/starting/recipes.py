"""``recipes``: list and read the recipes, complete configurations to start from. Does not import torch."""

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_ups.config.suggestions import parse_options, suggest

_FOLDER = Path(__file__).parents[2] / "recipes"


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def text(name: str) -> str:
    """Return the YAML of a recipe.

    Raises:
        ValueError: If there is no such recipe.
    """
    if name not in names():
        raise ValueError(f"Unknown recipe {name!r}. {suggest(name, names())}")
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def summary(name: str) -> tuple[str, str, str]:
    """Return what a recipe does, its hardware, and its planned memory for each GPU: its first three lines."""
    found = re.match(r"# (.+)\n# hardware: (.+)\n# planned: (.+)\n", text(name))
    assert found is not None
    what, hardware, planned = found.groups()
    return what, hardware, planned


def main(argv: Sequence[str]) -> int:
    """Print one line for each recipe, or the YAML of the recipe that is named."""
    parser = ArgumentParser(
        prog="python -m lightning_ups recipes",
        description="List the recipes (complete configurations to start from). `init NAME` copies one to a file.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this recipe as YAML")
    if (name := parse_options(parser, argv).name) is not None:
        print(text(name), end="")
        return 0
    rows = [("recipe", "does", "on", "memory planned for each GPU")]
    rows += [(name, *summary(name)) for name in names()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
