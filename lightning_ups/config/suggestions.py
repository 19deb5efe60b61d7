"""Suggest the name that was probably meant, for a misspelled name, file or option."""

import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name in `known` that is closest to `name`, or None if none is close.

    Case is ignored, and a name matches if only its prefix is missing (``max_epochs`` for ``trainer.max_epochs``).
    """
    folded = {each.casefold(): each for each in sorted(known)}
    wanted = name.casefold()
    for each in folded:
        if each == wanted or each.endswith("." + wanted):
            return folded[each]
    close = get_close_matches(wanted, folded, cutoff=cutoff)
    close.sort(key=lambda each: not _differs_in_one_letter(each, wanted))
    return folded[close[0]] if close else None


def _differs_in_one_letter(known: str, wanted: str) -> bool:
    return len(known) == len(wanted) and sum(a != b for a, b in zip(known, wanted, strict=True)) == 1


def suggest(name: str, known: Iterable[str], *, most: int = 12, otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return a sentence with the closest known name, else with the first known names, else `otherwise`."""
    names = sorted(known)
    if (near := nearest(name, names, cutoff=cutoff)) is not None:
        return f"Did you mean {near!r}?"
    if not names:
        return otherwise
    return f"Use one of: {', '.join(names[:most])}{', ...' if len(names) > most else '.'}"


def suggest_file(name: str | Path, *, endings: Sequence[str], otherwise: str = "Check the path.") -> str:
    """Return a sentence with the files closest to `name`: a missing file, or a folder in which to choose one.

    Args:
        name: The path.
        endings: Endings that the right file may have, such as ``.yaml``. They are left out of the comparison.
        otherwise: Returned if there is no such file.
    """
    wanted = Path(name)
    folder = wanted if wanted.is_dir() else wanted.parent
    if not folder.is_dir():
        return otherwise
    files = {path.name.removesuffix(path.suffix): path for path in folder.iterdir() if path.name.endswith((*endings,))}
    stem = wanted.name.removesuffix(wanted.suffix if wanted.suffix in endings else "")
    near = None if folder == wanted else nearest(stem, files)
    return f"Did you mean {str(files[near])!r}?" if near else suggest("", map(str, files.values()), otherwise=otherwise)


def unknown_command(words: Sequence[str], known: Iterable[str]) -> str:
    """Return the error for a command line without a command that is known."""
    if not words or words[0].startswith("-"):
        return f"There is no command. Write one first, as in: {shlex.join(['fit', *words])}"
    return f"Unknown command {words[0]!r}. {suggest(words[0], known)}"


def check_config(source: str) -> None:
    """Refuse `source`, given by --config, if it is neither a file nor YAML text nor a URL.

    Raises:
        FileNotFoundError: If it is none of them.
    """
    if "\n" in source or source.lstrip().startswith("{") or "://" in source:
        return
    if os.path.isdir(source) or not os.path.exists(source):
        what = "is a folder" if os.path.isdir(source) else "does not exist"
        suggestion = suggest_file(source, endings=(".yaml", ".yml"))
        raise FileNotFoundError(f"The file {source!r} {what} (looked up from {Path.cwd()}). {suggestion}")


def parse_options(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse `argv` with `parser`.

    Raises:
        ValueError: If an option is unknown, missing or wrong.
    """
    options, unknown = parse_own_options(parser, argv)
    if unknown:
        option = unknown[0].partition("=")[0]
        known = {"--debug", *re.findall(r"--[a-z][\w-]*", parser.format_usage())}
        raise ValueError(f"{_command(parser)}: unknown argument {option!r}. {suggest(option, known)}")
    return options


def parse_own_options(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the options of `parser`, and the other words of `argv`.

    Raises:
        ValueError: If an option is missing or wrong.
    """

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{_command(parser)}: {message.rstrip('.')}. `{parser.prog} --help` lists the options.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_known_args(argv)


def _command(parser: ArgumentParser) -> str:
    return parser.prog.rpartition(" ")[2]
