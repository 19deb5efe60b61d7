"""Temporarily replaces a method of an object."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_UNKNOWN: Any = object()


@contextmanager
def instead_of(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace the method ``name`` of ``owner`` by ``method`` while the context is open.

    Contexts may end in any order: a later replacement stays.
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
