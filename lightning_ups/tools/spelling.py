"""The nearest right name for a wrong one."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest", "suggestion"]


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
    close = get_close_matches(wanted, folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def suggestion(name: str, among: Iterable[str], *, most: int = 12, otherwise: str = "There is none.") -> str:
    """Return the sentence that cures a wrong ``name``: the nearest right one, or some of them, or ``otherwise``."""
    known = sorted(among)
    if (near := nearest(name, known)) is not None:
        return f"Did you mean {near!r}?"
    if not known:
        return otherwise
    return f"Use one of: {', '.join(known[:most])}{', ...' if len(known) > most else '.'}"
