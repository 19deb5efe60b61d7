"""Checks arguments whose wrong values would fail late or be misread, and reports those without an effect.

Types are left to the type checker and to jsonargparse.
"""

import math
from collections.abc import Sequence, Sized
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

OnNoEffect = Literal["raise", "warn"]


def check_choice(name: str, value: object, choices: Sequence[object], *, of: str, why: str) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{of}({name}={value!r}) is not a known choice. {why} Use one of {tuple(choices)}.")


def check_on_no_effect(value: OnNoEffect, *, of: str) -> OnNoEffect:
    """Return ``value``, or raise ValueError if it is not a known choice."""
    why = "It says what follows if the part has no effect."
    check_choice("on_no_effect", value, get_args(OnNoEffect), of=of, why=why)
    return value


def raise_or_warn(message: str, on_no_effect: OnNoEffect) -> None:
    """Raise RuntimeError, or warn, because a part has no effect."""
    if on_no_effect == "raise":
        raise RuntimeError(f"{message} With on_no_effect='warn' the run goes on.")
    rank_zero_warn(message)


def check_path(name: str, value: Any, *, of: str, why: str) -> None:
    """Raise ValueError if ``value`` is an empty string, which would be the current folder."""
    if value == "":
        raise ValueError(f"{of}({name}='') is an empty path. {why} Name one, or leave {name} out.")


def check_least(name: str, value: Any, least: int, *, of: str, why: str, optional: bool = False) -> None:
    """Raise ValueError if ``value`` is a number below ``least``; ``optional`` says that None is allowed."""
    if value is not None and value < least:
        words = ", or None" if optional else ""
        raise ValueError(f"{of}({name}={value}) is out of range. {why} Use {least} or more{words}.")


def check_finite(
    name: str,
    value: Any,
    *,
    of: str,
    why: str,
    above: float | None = None,
    most: float | None = None,
    optional: bool = False,
) -> None:
    """Raise ValueError unless ``value`` is finite: at least 0 or, if given, larger than ``above``; at most ``most``.

    None raises TypeError, unless ``optional``.
    """
    if value is None:
        if not optional:
            raise TypeError(f"{of}({name}=None) is not a number. {why} Use a number, or leave {name} out.")
        return
    enough = value >= 0 if above is None else value > above
    if not enough or not (value < math.inf if most is None else value <= most):
        least = "0 or more" if above is None else f"more than {above:g}"
        words = ("" if most is None else f", up to {most:g}") + (", or None" if optional else "")
        raise ValueError(f"{of}({name}={value}) is out of range. {why} Use a finite number, {least}{words}.")


def check_some(name: str, value: Sized | None, *, of: str, why: str) -> None:
    """Raise ValueError if ``value`` is an empty list, which would select nothing, while None selects automatically."""
    if value is not None and not len(value):
        raise ValueError(f"{of}({name}=[]) is an empty list. {why} Name some, or leave {name} out.")
