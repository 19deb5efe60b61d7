"""Runs a forward a second time with the same host random numbers, and restores the generators afterwards.

Torch's checkpoint does this for torch's own generators: that of the CPU, and that of the arguments' device.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["DrawnBefore", "run_with_drawn"]


class DrawnBefore(NamedTuple):
    """The earlier state of a random number generator, and how to restore it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any

    def is_unmoved(self) -> bool:
        """Return whether nothing was drawn since, as far as a cheap check can tell."""
        now = self.get()
        return now is self.state or (self.get is random.getstate and now == self.state)


def run_with_drawn(before: list[list[DrawnBefore]], attributes: Iterable[Any], forward: Callable[[], Any]) -> Any:
    """Run ``forward`` for the first time if ``before`` is empty, otherwise again.

    Python's and NumPy's global generators, and those among ``attributes``, have the state of the first run, and
    continue afterwards as if there had been no second run.

    Args:
        before: The states of the generators in the first run; filled then, to be passed again.
        attributes: The attributes of the modules that run.
        forward: The function to run.
    """
    if not before:
        drawn = [DrawnBefore(get, set_, get()) for get, set_ in _generators(attributes)]
        result = forward()
        before.append([each for each in drawn if not each.is_unmoved()])
        return result
    now = [drawn._replace(state=drawn.get()) for drawn in before[0]]
    _put(before[0])
    try:
        return forward()
    finally:
        _put(now)


def _put(states: Iterable[DrawnBefore]) -> None:
    for drawn in states:
        drawn.set(drawn.state)


def _generators(attributes: Iterable[Any]) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield _NUMPY.get, _NUMPY.set
    for value in attributes:
        kind = type(value)
        if kind is torch.Generator:
            yield value.get_state, value.set_state
        elif kind is random.Random:
            yield value.getstate, value.setstate
        elif numpy is not None and kind is numpy.RandomState:
            yield value.get_state, value.set_state
        elif numpy is not None and kind is numpy.Generator:
            bits = value.bit_generator
            yield (lambda bits=bits: bits.state), (lambda state, bits=bits: setattr(bits, "state", state))


class _NumPy:
    """NumPy's global generator. Its state is copied only if it has changed, since a copy is slow."""

    def __init__(self) -> None:
        self._bits: Any = None  # its bit generator
        self._address = 0
        self._last: tuple[bytes, Any] | None = None  # as raw memory, and as NumPy returns it

    def get(self) -> Any:
        raw = self._raw()
        # Using a cached normal number does not change the memory, so with one nothing is known.
        if raw is not None and self._last is not None and raw == self._last[0] and not self._last[1]["has_gauss"]:
            return self._last[1]
        state = sys.modules["numpy.random"].get_state(legacy=False)
        self._last = None if raw is None else (raw, state)
        return state

    def set(self, state: Any) -> None:
        if self.get() is not state:
            sys.modules["numpy.random"].set_state(state)
            raw = self._raw()
            self._last = None if raw is None else (raw, state)

    def _raw(self) -> bytes | None:
        """Return the memory of the Mersenne Twister, 624 numbers and a position, or None for another generator."""
        numpy = sys.modules["numpy.random"]
        get_bits = getattr(numpy, "get_bit_generator", None)  # since NumPy 1.24
        bits: Any = get_bits and get_bits()
        if type(bits) is not numpy.MT19937:
            return None
        if bits is not self._bits:
            self._bits, self._address = bits, bits.ctypes.state_address
        return ctypes.string_at(self._address, 625 * 4)


_NUMPY = _NumPy()
