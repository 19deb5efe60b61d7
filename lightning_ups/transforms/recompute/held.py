"""Running a forward a second time with what its modules had in the first.

By then `torch.func.functional_call` has put the module's own tensors back, what makes a buffer where it has none has
one, a model is in evaluation, a discriminator is no longer frozen, and a recurrent layer has its next state.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, takewhile
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Held", "HeldBefore", "own_attributes"]

_Tensors = Mapping[str, Tensor | None]

# What every module has for itself: hooks and containers, which stay, and whether it trains, which is put back.
_STRUCTURE = (vars(nn.Module()).keys() - {"training"}) | {"forward", "_compiled_call_impl"}
# Modules that know of a second forward themselves, and note in their attributes how far they are.
_NOTE_IT = (
    "deepspeed.",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.nn.parallel.",
    "transformer_engine.",
)


class HeldBefore(NamedTuple):
    """A module, all its attributes, and which tensors were its parameters, whether they trained, and its buffers."""

    module: nn.Module
    attributes: Mapping[str, Any]
    parameters: _Tensors
    trained: Sequence[bool]
    buffers: _Tensors


class Held:
    """What the modules below a block have: their attributes and the tensors themselves, not what is in them.

    Args:
        block: Whose forward is to be run twice.
    """

    def __init__(self, block: nn.Module) -> None:
        # Those of TorchScript hold theirs in C++, where nobody puts others in their place.
        self._modules = [module for module in block.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._left_out = [_names_left_out(module) for module in self._modules]
        # All modules have these first. Nothing that a forward draws from is among them.
        self._first_own = [_num_leading(vars(module), _STRUCTURE | {"training"}) for module in self._modules]

    def run(self, before: list[HeldBefore], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for the first time, if ``before`` is empty, or once more.

        Args:
            before: What the modules had at the first time, filled then, to be passed again.
            forward: What to run.
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
        """Yield what the modules had as attributes of their own."""
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
    """Return what a forward of ``module`` may read and write as an attribute of it, by name."""
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
    # As a rule nothing has changed, and this is done for each module of each block.
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
