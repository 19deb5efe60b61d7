"""Print lines for people: notes on stderr, titled sections, short numbers and paths."""

import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

WIDTH = 110


@rank_zero_only
def note(line: str) -> None:
    """Print a line on stderr: stdout is for what programs read, such as ``--print_config``."""
    print(line, file=sys.stderr, flush=True)


def titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield wrapped lines, the first one with a title in front."""
    for index, line in enumerate(lines):
        start = f"{title if index == 0 else '':9} "
        yield textwrap.fill(line, WIDTH, initial_indent=start, subsequent_indent=" " * 12, break_on_hyphens=False)


def readable_count(number: int) -> str:
    """Return a number such as 1.5 B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as 2:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def short_path(path: str | Path) -> str:
    """Return a path relative to the working directory, if it is below it."""
    below = os.path.relpath(path)
    return str(path) if below.startswith("..") or "://" in str(path) else below


def shell_word(path: str | Path) -> str:
    """Return a short path that can be pasted into a shell."""
    return shlex.quote(short_path(path))
