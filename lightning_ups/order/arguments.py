"""Checks arguments whose wrong values would fail late or be misread, and reports those without an effect.

Types are left to the type checker and to jsonargparse, except for numbers.
"""

import math
import sys
from collections.abc import Sequence, Sized
from numbers import Integral, Real
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

__all__ = [
    "OnNoEffect",
    "check_choice",
    "check_finite",
    "check_kind",
    "check_least",
    "check_on_no_effect",
    "check_path",
    "check_seed",
    "check_some",
    "raise_or_warn",
]

OnNoEffect = Literal["raise", "warn"]

_KINDS = {int: (Integral, "a whole number"), float: (Real, "a number")}  # includes numpy's numbers


def check_choice(name: str, value: object, choices: Sequence[object], *, of: str, why: str) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{of}({name}={value!r}) is not a known choice. {why} Use one of {tuple(choices)}.")


def check_kind(
    name: str, value: Any, kind: type[int] | type[float], *, of: str, why: str, optional: bool = False
) -> None:
    """Raise TypeError unless ``value`` is a number of ``kind``. An int is accepted as a float; a bool is not a number.

    Args:
        name: The name of the argument.
        value: Its value.
        kind: ``int`` or ``float``.
        of: The class that takes the argument.
        why: A sentence that says what the argument is.
        optional: Whether it may be None.
    """
    if value is None and optional:
        return
    number, words = _KINDS[kind]
    if not isinstance(value, number) or isinstance(value, bool):
        words += ", or None" if optional else ""
        raise TypeError(f"{of}({name}={value!r}) is a {type(value).__name__}. {why} Use {words}.")


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
    """Raise unless ``value`` is an integer from ``least`` to ``sys.maxsize``."""
    check_kind(name, value, int, of=of, why=why, optional=optional)
    if value is not None and not least <= value <= sys.maxsize:
        most = "" if value < least else f", up to {sys.maxsize}"
        words = ", or None" if optional else ""
        raise ValueError(f"{of}({name}={value}) is out of range. {why} Use {least} or more{most}{words}.")


def check_seed(seed: int, *, of: str, why: str) -> None:
    """Raise unless ``seed`` is valid for a ``torch.Generator``."""
    check_kind("seed", seed, int, of=of, why=why)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(
            f"{of}(seed={seed}) is out of range. {why} Use a number of 64 bits, such as 0: torch's generators take no"
            " longer one."
        )


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
    """Raise unless ``value`` is a finite number: at least 0 or, if given, larger than ``above``; at most ``most``."""
    check_kind(name, value, float, of=of, why=why, optional=optional)
    if value is None:
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
