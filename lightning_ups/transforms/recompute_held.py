"""Running a forward a second time with the tensors that its modules had in the first.

By then `torch.func.functional_call` has put the module's own back, and what makes a buffer where it has none has one.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Held", "HeldBefore"]

_Tensors = Mapping[str, Tensor | None]


class HeldBefore(NamedTuple):
    """A module, and which tensors were its parameters and buffers."""

    module: nn.Module
    parameters: _Tensors
    buffers: _Tensors


class Held:
    """Which tensors the modules below a block have: the tensors themselves, and not what is in them.

    Args:
        block: Whose forward is to be run twice.
    """

    def __init__(self, block: nn.Module) -> None:
        # Those of TorchScript hold theirs in C++, where nobody puts others in their place.
        self._modules = [module for module in block.modules() if not isinstance(module, torch.jit.ScriptModule)]

    def run(self, before: list[HeldBefore], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for the first time, if ``before`` is empty, or once more.

        Args:
            before: What the modules had at the first time, filled then, to be passed again.
            forward: What to run.
        """
        now = [HeldBefore(module, dict(module._parameters), dict(module._buffers)) for module in self._modules]
        if not before:
            before += now
            return forward()
        _put(before)
        try:
            return forward()
        finally:
            _put(now)


def _put(states: Iterable[HeldBefore]) -> None:
    for module, parameters, buffers in states:
        _set(module._parameters, parameters)
        _set(module._buffers, buffers)


def _set(held: MutableMapping[str, Any], wanted: _Tensors) -> None:
    for name in held.keys() - wanted.keys():
        del held[name]
    for name, tensor in wanted.items():
        if name not in held or held[name] is not tensor:
            held[name] = tensor
