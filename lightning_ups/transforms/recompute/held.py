"""Runs a forward a second time with the module attributes of the first run.

Before the second run, `torch.func.functional_call` may have restored the module's own tensors, a buffer may have been
created, the model may be in evaluation mode, a discriminator may no longer be frozen, and a recurrent layer may have
its next state.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, takewhile
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Held", "HeldBefore", "own_attributes"]

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
    """The attributes and tensors of the modules below a block, but not the values of the tensors.

    Args:
        block: The block whose forward runs twice.
    """

    def __init__(self, block: nn.Module) -> None:
        # TorchScript modules hold theirs in C++, where they cannot be replaced.
        self._modules = [module for module in block.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._left_out = [_names_left_out(module) for module in self._modules]
        # All modules have these first. A forward draws no random numbers from them.
        self._first_own = [_num_leading(vars(module), _STRUCTURE | {"training"}) for module in self._modules]

    def run(self, before: list[HeldBefore], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for the first time if ``before`` is empty, otherwise again.

        Args:
            before: The attributes in the first run; filled then, to be passed again.
            forward: The function to run.
        """
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


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` that its forward may read and write, by name."""
    left_out = _names_left_out(module)
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _now(module: nn.Module) -> HeldBefore:
    parameters = {**module._parameters}
    trained = [parameter is not None and parameter.requires_grad for parameter in parameters.values()]
    return HeldBefore(module, {**vars(module)}, parameters, trained, {**module._buffers})


def _num_leading(names: Iterable[str], of: Container[str]) -> int:
    return sum(1 for _ in takewhile(lambda name: name in of, names))


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
