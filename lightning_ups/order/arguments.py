"""Checking the kind of an argument, where a wrong one would fail late or pass for something else."""

from numbers import Integral, Real
from os import PathLike
from typing import Any

__all__ = ["check_kind"]

# numpy's numbers too
_KINDS: dict[type, tuple[type, ...]] = {int: (Integral,), float: (Real,), PathLike: (str, PathLike)}
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", PathLike: "a path"}


def check_kind(name: str, value: Any, kind: type, *, of: str, why: str, optional: bool = False) -> None:
    """Raise unless ``value`` is of ``kind``; a whole number is a number, and True is none.

    Args:
        name: Of the argument.
        value: What was given.
        kind: ``bool``, ``int``, ``float``, ``str`` or ``PathLike``, which a string is too.
        of: The class that got it.
        why: What the argument is, as a sentence.
        optional: Whether it may be None.

    Raises:
        TypeError: If it is of another kind.
    """
    if value is None and optional:
        return
    fits = isinstance(value, _KINDS.get(kind, kind)) and (kind is bool or not isinstance(value, bool))
    if not fits:
        words = _WORDS[kind] + (", or None" if optional else "")
        raise TypeError(f"{of}({name}={value!r}) is a {type(value).__name__}. {why} Use {words}.")
