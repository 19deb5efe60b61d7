"""Formats errors and lists of names for use in messages."""

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, without its full stop, or its class if the text is empty."""
    return _text(error).partition("\n")[0].rstrip(" .:") or type(error).__name__


def listed(names: Sequence[str]) -> str:
    """Return the first five of ``names``, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def quoted(error: BaseException, *, whole: bool = False) -> str:
    """Return the class of ``error`` and the first line of its text; with ``whole``, all of the text."""
    said = _text(error) if whole else _text(error).partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def several(count: int, noun: str) -> str:
    """Return ``count`` with ``noun``, as in "1 block" and "2 blocks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _text(error: BaseException) -> str:
    return str(error).strip()
