"""Runs a forward a second time as the first time: with its buffers, attributes and random numbers.

Each ``run`` is passed a list, empty in the first run, which it fills, and with which the second run begins. What the
second run changes is undone.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, takewhile
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ups._compat.torch.tensors.autograd import dense_parts, has_values, outside_modes

_Tensors = Mapping[str, Tensor | None]

# Attributes that every module has: hooks and containers, which are not restored, and `training`, which is.
_STRUCTURE = (vars(nn.Module()).keys() - {"training"}) | {"forward", "_compiled_call_impl"}
# Modules that handle a second forward themselves, and record their progress in attributes.
_NOTE_IT = (
    "deepspeed.",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.nn.parallel.",
    "transformer_engine.",
)


class HeldBefore(NamedTuple):
    """A module, its attributes, and its parameters, their `requires_grad`, and its buffers."""

    module: nn.Module
    attributes: Mapping[str, Any]
    parameters: _Tensors
    trained: Sequence[bool]
    buffers: _Tensors


class Held:
    """The attributes and tensors of the modules below ``block``, but not the values of the tensors.

    Before the second run, `torch.func.functional_call` may have restored the module's own tensors, a buffer may have
    been created, the model may be in evaluation mode, a discriminator may no longer be frozen, and a recurrent layer
    may have its next state.
    """

    def __init__(self, block: nn.Module) -> None:
        # TorchScript modules hold theirs in C++, where they cannot be replaced.
        self._modules = [module for module in block.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._left_out = [_names_left_out(module) for module in self._modules]
        # All modules have these first. A forward draws no random numbers from them.
        structure = _STRUCTURE | {"training"}
        self._first_own = [sum(1 for _ in takewhile(structure.__contains__, vars(m))) for m in self._modules]

    def run(self, before: list[HeldBefore], forward: Callable[[], Any]) -> Any:
        """Run ``forward``; ``before`` gets the attributes in the first run."""
        now = [_now(module) for module in self._modules]
        if not before:
            before += now
            return forward()
        self._put(before)
        try:
            return forward()
        finally:
            self._put(now)

    def own_values(self, before: Iterable[HeldBefore]) -> Iterator[Any]:
        """Yield the modules' own attributes."""
        for first, held in zip(self._first_own, before, strict=True):
            yield from islice(held.attributes.values(), first, None)

    def _put(self, states: Iterable[HeldBefore]) -> None:
        for left_out, (module, attributes, parameters, trained, buffers) in zip(self._left_out, states, strict=True):
            _set(vars(module), attributes, left_out)
            _set(module._buffers, buffers)
            if parameters or module._parameters:
                _set(module._parameters, parameters)
                _set_trained(parameters.values(), trained)


def _now(module: nn.Module) -> HeldBefore:
    parameters = {**module._parameters}
    trained = [parameter is not None and parameter.requires_grad for parameter in parameters.values()]
    return HeldBefore(module, {**vars(module)}, parameters, trained, {**module._buffers})


class _AllButTraining:
    def __contains__(self, name: object) -> bool:
        return name != "training"


def _names_left_out(module: nn.Module) -> Container[str]:
    notes = any(base.__module__.startswith(_NOTE_IT) for base in type(module).__mro__)
    return _AllButTraining() if notes else _STRUCTURE


def _set(held: MutableMapping[str, Any], wanted: Mapping[str, Any], left_out: Container[str] = ()) -> None:
    # Usually nothing has changed, and this runs for each module of each block.
    if held.keys() == wanted.keys() and all(map(is_, held.values(), wanted.values())):
        return
    for name in [name for name in held if name not in wanted and name not in left_out]:
        del held[name]
    for name, value in wanted.items():
        if name not in left_out and (name not in held or held[name] is not value):
            held[name] = value


def _set_trained(parameters: Iterable[Tensor | None], trained: Iterable[bool]) -> None:
    for parameter, trains in zip(parameters, trained, strict=True):
        if parameter is not None and parameter.requires_grad is not trains and parameter.is_leaf:
            parameter.requires_grad_(trains)


class Taken(NamedTuple):
    """A buffer and its value."""

    module: nn.Module
    name: str
    is_plain: bool
    tensor: torch.Tensor
    value: torch.Tensor


class Buffers:
    """The buffers below ``block`` that its forward changes, found in the first forward of each training mode.

    Each forward updates the running statistics of batch norm, and the power iteration of spectral norm. A plain tensor
    attribute that a forward writes to counts as a buffer here.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = [*block.modules()]
        buffers = [(module, name, False) for module in modules for name, _ in module.named_buffers(recurse=False)]
        self._all = buffers + [(module, name, True) for module in modules for name in _plain(module)]
        self._changing: dict[tuple[bool, ...], list[tuple[nn.Module, str, bool]]] = {}

    def run(self, before: list[Taken], forward: Callable[[], Any]) -> Any:
        """Run ``forward``; ``before`` gets the values of the buffers in the first run."""
        if not self._all:
            return forward()
        return self._run_again(before, forward) if before else self._run_first(before, forward)

    def _run_first(self, before: list[Taken], forward: Callable[[], Any]) -> Any:
        # A selective checkpoint counts every operator of both runs, and must not see these.
        with outside_modes():
            before += self._take()
        result = forward()
        with outside_modes():
            if self._mode not in self._changing:
                # By value: versions do not count writes to `.data`, and a buffer may be another tensor now.
                before[:] = [taken for taken in before if not _is_as_it_was(taken)]
                self._changing[self._mode] = [(taken.module, taken.name, taken.is_plain) for taken in before]
        return result

    def _run_again(self, before: Sequence[Taken], forward: Callable[[], Any]) -> Any:
        with outside_modes():
            now = self._take()
            _put_buffers(before)
        try:
            return forward()
        finally:
            with outside_modes():
                _put_buffers(now)

    def _take(self) -> list[Taken]:
        places = self._changing.get(self._mode, self._all)
        buffers = ((place, _held(place[0], is_plain=place[2]).get(place[1])) for place in places)
        return [Taken(*place, tensor, tensor.clone()) for place, tensor in buffers if isinstance(tensor, Tensor)]

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _, _ in self._all)


def _plain(module: nn.Module) -> list[str]:
    if isinstance(module, torch.jit.ScriptModule):
        return []
    left_out = _names_left_out(module)
    own = {name: value for name, value in vars(module).items() if name not in left_out}
    # A tensor with a gradient is a result, not a buffer.
    return [name for name, value in own.items() if isinstance(value, Tensor) and not value.requires_grad]


def _held(module: nn.Module, *, is_plain: bool) -> MutableMapping[str, Any]:
    return vars(module) if is_plain else module._buffers


def _put_buffers(values: Sequence[Taken]) -> None:
    with torch.no_grad():
        for module, name, is_plain, buffer, value in values:
            _held(module, is_plain=is_plain)[name] = buffer
            buffer.copy_(value)


def _is_as_it_was(taken: Taken) -> bool:
    now = _held(taken.module, is_plain=taken.is_plain).get(taken.name)
    if taken.is_plain and now is not taken.tensor:
        return True  # a replacement is restored with all attributes
    if now is None or not has_values(now):
        return False  # unknown: assume it changed
    if now.shape != taken.value.shape or now.layout is not taken.value.layout:
        return False
    return all(map(torch.equal, dense_parts(now), dense_parts(taken.value)))


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
    """Run ``forward``; ``before`` gets the states of random number generators in the first run.

    They are Python's and NumPy's global generators, and those among ``attributes``, and continue afterwards as if there
    had been no second run. Torch's checkpoint does this for torch's own: that of the CPU, and that of the arguments'
    device.
    """
    if not before:
        drawn = [DrawnBefore(get, set_, get()) for get, set_ in _generators(attributes)]
        result = forward()
        before.append([each for each in drawn if not each.is_unmoved()])
        return result
    now = [drawn._replace(state=drawn.get()) for drawn in before[0]]
    _put_drawn(before[0])
    try:
        return forward()
    finally:
        _put_drawn(now)


def _put_drawn(states: Iterable[DrawnBefore]) -> None:
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
