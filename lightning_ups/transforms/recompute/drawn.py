"""Running a forward a second time with the random numbers that the host gave the first, and going on after them.

Torch's checkpoint does so for torch's own generators: of the CPU, and of the device of a block's arguments.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["DrawnBefore", "run_with_drawn"]


class DrawnBefore(NamedTuple):
    """How to put back what a generator of random numbers had in it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any

    def is_unmoved(self) -> bool:
        """Return whether nothing was drawn since, as far as a cheap check can see."""
        now = self.get()
        return now is self.state or (self.get is random.getstate and now == self.state)


def run_with_drawn(before: list[list[DrawnBefore]], attributes: Iterable[Any], forward: Callable[[], Any]) -> Any:
    """Run ``forward`` for the first time, if ``before`` is empty, or once more.

    Python's and NumPy's own generators, and each that is among ``attributes``, are as they were the first time, and
    after it as if it had not been run again.

    Args:
        before: What the generators had in them at the first time, filled then, to be passed again.
        attributes: What the modules that run have as attributes.
        forward: What to run.
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
    """NumPy's own generator, of which the state is copied only where it has moved, since that takes long."""

    def __init__(self) -> None:
        self._bits: Any = None  # what makes its numbers
        self._address = 0
        self._last: tuple[bytes, Any] | None = None  # in memory, and as NumPy tells it

    def get(self) -> Any:
        raw = self._raw()
        # A normal number that is left over of two is used up without a move, so that with one nothing is known.
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
        """Return the memory of the Mersenne Twister, 624 numbers and a place among them, or None if it is another."""
        numpy = sys.modules["numpy.random"]
        get_bits = getattr(numpy, "get_bit_generator", None)  # since NumPy 1.24
        bits: Any = get_bits and get_bits()
        if type(bits) is not numpy.MT19937:
            return None
        if bits is not self._bits:
            self._bits, self._address = bits, bits.ctypes.state_address
        return ctypes.string_at(self._address, 625 * 4)


_NUMPY = _NumPy()
