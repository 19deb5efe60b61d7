"""Putting a method in the place of one that an object has, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["instead_of"]

_UNKNOWN: Any = object()


@contextmanager
def instead_of(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let ``owner`` call ``method`` by ``name`` while the context is open, and give it back what it had of its own.

    Contexts may end in any order: what was put in the place of ``method`` meanwhile stays.
    """
    place: Any = method
    place.before, place.over = vars(owner).get(name, _UNKNOWN), False
    setattr(owner, name, method)
    try:
        yield
    finally:
        place.over = True
        while getattr(now := vars(owner).get(name, _UNKNOWN), "over", False):
            if now.before is _UNKNOWN:
                delattr(owner, name)
            else:
                setattr(owner, name, now.before)
