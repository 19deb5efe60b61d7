"""What the hooks of a module do, as something to compare: by code and what that closes over, and not by identity."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from typing_extensions import override

from lightning_ups._compat.optional.transformers import is_output_hook

_PLACES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SIMPLE = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device, CodeType)
_DEPTH = 6


def has_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` has hooks of its own that may act on something beside its inputs and outputs."""
    return any(not is_output_hook(hook) for place in _PLACES for hook in getattr(module, place).values())


def hooks_of(module: nn.Module) -> Hashable:
    """Return what is the same for two modules whose hooks do the same, and differs where they may not.

    Dynamo does not look at the hooks of modules within what it compiled: a block whose hooks differ from those of the
    block that it was compiled for would run without its own, in silence.
    """
    return tuple(tuple(_done_by(hook) for hook in getattr(module, place).values()) for place in _PLACES)


def _done_by(value: Any, depth: int = 0) -> Hashable:
    def inner(values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(_done_by(each, depth + 1) for each in values)

    if depth == _DEPTH:  # a function may close over itself
        return _Identity(value)
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, inner(_contents(value)), inner(defaults)
    if isinstance(value, MethodType):
        return inner((value.__func__, value.__self__))
    if isinstance(value, partial):
        return inner((value.func, *value.args, *value.keywords.items()))
    if isinstance(value, tuple):
        return type(value), *inner(value)
    if isinstance(value, _SIMPLE):
        return type(value), value
    if type(value).__eq__ is not object.__eq__ and type(value).__hash__ not in (None, object.__hash__):
        return type(value), value  # placements and meshes, say, which are equal by what they are
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and own and all(isinstance(each, _SIMPLE) for each in own.values()):
        return type(value), *sorted(own.items())  # as that of weight_norm
    return _Identity(value)


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents


class _Identity:
    """An object that is equal to itself alone, and lives no longer for it if anything can refer to it weakly."""

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._value: Any = ref(value)
        except TypeError:  # nothing can refer to it weakly
            self._value = lambda: value

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and (value := self._value()) is not None and value is other._value()

    @override
    def __hash__(self) -> int:
        return self._number
