"""Runs a forward a second time with the buffers of the first run, and without changing the current ones.

Each forward updates the running statistics of batch norm, and the power iteration of spectral norm. A plain tensor
attribute that a forward writes to counts as a buffer here.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_ups._compat.torch.tensors.autograd import dense_parts, has_values, outside_modes
from lightning_ups.transforms.recompute.held import own_attributes

__all__ = ["Buffers", "Taken"]


class Taken(NamedTuple):
    """A buffer and its value."""

    module: nn.Module
    name: str
    is_plain: bool
    tensor: torch.Tensor
    value: torch.Tensor


class Buffers:
    """The buffers below a block that its forward changes, found in the first forward of each training mode.

    Args:
        block: The block whose forward runs twice. Tensor attributes count as buffers.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = [*block.modules()]
        buffers = [(module, name, False) for module in modules for name, _ in module.named_buffers(recurse=False)]
        plain = [(module, name, True) for module in modules for name in _plain(module)]
        self._all: list[tuple[nn.Module, str, bool]] = [*buffers, *plain]
        self._changing: dict[tuple[bool, ...], list[tuple[nn.Module, str, bool]]] = {}

    def run(self, before: list[Taken], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for the first time if ``before`` is empty, otherwise again.

        Args:
            before: The values of the buffers in the first run; filled then, to be passed again.
            forward: The function to run.
        """
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
            _put(before)
        try:
            return forward()
        finally:
            with outside_modes():
                _put(now)

    def _take(self) -> list[Taken]:
        places = self._changing.get(self._mode, self._all)
        buffers = ((place, _held(place[0], is_plain=place[2]).get(place[1])) for place in places)
        return [Taken(*place, tensor, tensor.clone()) for place, tensor in buffers if isinstance(tensor, torch.Tensor)]

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _, _ in self._all)


def _plain(module: nn.Module) -> list[str]:
    if isinstance(module, torch.jit.ScriptModule):
        return []
    own = own_attributes(module)
    # A tensor with a gradient is a result, not a buffer.
    return [name for name, value in own.items() if isinstance(value, torch.Tensor) and not value.requires_grad]


def _held(module: nn.Module, *, is_plain: bool) -> MutableMapping[str, Any]:
    return vars(module) if is_plain else module._buffers


def _put(values: Sequence[Taken]) -> None:
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
