"""``init``: copy a recipe to a file of your own."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_ups.commands.starting import recipes
from lightning_ups.config.output import shell_word
from lightning_ups.config.suggestions import parse_options

_DEFAULT = "run.yaml"  # also the name in the comments of the recipes


def main(argv: Sequence[str]) -> int:
    """Write the file and print what to do next."""
    parser = ArgumentParser(
        prog="python -m lightning_ups init",
        description="Copy a recipe to a file, as a starting point. `recipes` lists all recipes.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the recipe")
    parser.add_argument("--output", metavar="FILE", default=_DEFAULT, help=f"file to write (default: {_DEFAULT})")
    asked = parse_options(parser, argv)
    output = Path(asked.output)
    text = recipes.text(asked.name).replace(_DEFAULT, shell_word(asked.output))
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"--output {output} exists. Name another file; nothing is overwritten.") from None
    what, hardware, planned = recipes.summary(asked.name)
    print(f"{output}: {what}")
    print(f"For {hardware}; {planned} of memory planned for each GPU. Next, as the file says:")
    print(*(line.removeprefix("#").rstrip() for line in text.splitlines() if line.startswith("#     ")), sep="\n")
    return 0
