"""The nearest right name for a wrong one."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

__all__ = ["file_suggestion", "nearest", "parsed", "suggestion"]


def nearest(name: str, among: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return which of ``among`` was probably meant by ``name``, or None.

    Case is ignored, and a name that is right but for what leads to it (``max_epochs`` for ``trainer.max_epochs``)
    counts as near. ``cutoff`` is how alike two names must be, from 0 to 1: more of it where there are very many.
    """
    folded = {known.casefold(): known for known in sorted(among)}
    wanted = name.casefold()
    for known in folded:
        if known == wanted or known.endswith("." + wanted):
            return folded[known]
    close = get_close_matches(wanted, folded, cutoff=cutoff)
    # Another letter is nearer than one that is missing, by which names are more alike in length.
    close.sort(key=lambda known: not _is_one_off(known, wanted))
    return folded[close[0]] if close else None


def _is_one_off(known: str, wanted: str) -> bool:
    return len(known) == len(wanted) and sum(a != b for a, b in zip(known, wanted, strict=True)) == 1


def suggestion(name: str, among: Iterable[str], *, most: int = 12, otherwise: str = "There is none.") -> str:
    """Return the sentence that cures a wrong ``name``: the nearest right one, or some of them, or ``otherwise``."""
    known = sorted(among)
    if (near := nearest(name, known)) is not None:
        return f"Did you mean {near!r}?"
    if not known:
        return otherwise
    return f"Use one of: {', '.join(known[:most])}{', ...' if len(known) > most else '.'}"


def file_suggestion(name: str, *, endings: Sequence[str], otherwise: str = "Check the path.") -> str:
    """Return the sentence that cures the name of a file that is not there.

    Files are compared without their ending, which may be missing or another one, and would make any two alike; a
    folder may be misspelled, or left out.

    Args:
        name: What was asked for: a path, or a folder in which the file is to be chosen.
        endings: Those that the right file may have, such as ``.yaml``.
        otherwise: What to say where nothing is near, and there is nothing to choose from.
    """
    wanted = Path(name)
    folder = wanted if wanted.is_dir() else _nearest_folder(wanted.parent)
    if folder is None:
        return otherwise
    there = {stem: path for path in sorted(folder.iterdir(), reverse=True) if (stem := _stem(path, endings))}
    if folder != wanted:
        stem = _stem(wanted, endings) or wanted.name
        below = [path for ending in endings for path in sorted(folder.glob(f"*/{stem}{ending}"))]
        near = nearest(stem, there)
        found = there.get(stem) or (below[0] if below else near and there[near])
        if found:
            return f"Did you mean {str(found)!r}?"
    return suggestion("", map(str, there.values()), otherwise=otherwise)


def parsed(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Return what ``parser`` makes of ``argv``.

    Raises:
        ValueError: If an option is one that it does not have, with the nearest that it has, is missing or is wrong.
    """
    command = parser.prog.rpartition(" ")[2]

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{command} cannot run: {message}. `{parser.prog} --help` lists what it takes.")

    parser.error = refuse  # type: ignore[method-assign]
    asked, unknown = parser.parse_known_args(argv)
    if unknown:
        option = unknown[0].partition("=")[0]
        known = {"--debug", *re.findall(r"--[a-z][\w-]*", parser.format_usage())}
        what = "has no option" if option.startswith("-") else "takes no"
        raise ValueError(
            f"{command} {what} {option!r}. `{command} --help` lists what it takes. {suggestion(option, known)}"
        )
    return asked


def _stem(path: Path, endings: Sequence[str]) -> str | None:
    return next((path.name.removesuffix(ending) for ending in endings if path.name.endswith(ending)), None)


def _nearest_folder(wanted: Path) -> Path | None:
    if wanted.is_dir():
        return wanted
    above = _nearest_folder(wanted.parent)
    folders = {path.name: path for path in above.iterdir() if path.is_dir()} if above else {}
    near = nearest(wanted.name, folders)
    return folders[near] if near else None
