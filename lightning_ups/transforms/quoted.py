"""What an error says, and lists of names, within a sentence."""

from collections.abc import Sequence

__all__ = ["first_line", "listed", "quoted"]


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, without its full stop, or its class if it says nothing."""
    return _text(error).partition("\n")[0].rstrip(" .:") or type(error).__name__


def listed(names: Sequence[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def quoted(error: BaseException, *, whole: bool = False) -> str:
    """Return the class of ``error`` and the first line of what it says, or all with ``whole``, if it says anything."""
    said = _text(error) if whole else _text(error).partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _text(error: BaseException) -> str:
    return str(error).strip()
