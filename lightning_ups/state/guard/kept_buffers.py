"""Undoes, on the device, what a step wrote into a module's buffers, such as running statistics."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from lightning_ups._compat.torch.tensors.tensors import count_writes
from lightning_ups._compat.torch.versions import NormWithStatistics

__all__ = ["KeptBuffers"]

_Place = tuple[nn.Module, str]
_STATISTICS = ("running_mean", "running_var")  # of any class: torch's kernels write them without updating their version


class KeptBuffers:
    """Saves buffers that steps write to, so that a bad step leaves nothing in them.

    Earlier steps show which buffers are written: those of norms always, others once they were written. The first step
    saves all. Not restored are buffers of lazy modules before their first batch, other tensor subclasses and layouts,
    and buffers on the host if the model is on a device, which would require a synchronization.

    Args:
        module: The module with the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[_Place] = [(inner, name) for inner in module.modules() for name, _ in inner._buffers.items()]
        self._certain = [isinstance(inner, NormWithStatistics) or name in _STATISTICS for inner, name in self._places]
        self._written: list[bool] | None = None
        self._kept: dict[int, Tensor] = {}  # by index
        self._marks: list[tuple[int, int]] = []

    def keep(self) -> None:
        """Save the buffers before a step."""
        buffers = self._buffers()
        self._marks = [_mark(buffer) for buffer in buffers]
        self._kept = {}
        written = self._written or [True] * len(buffers)
        wanted = {i: b for i, b in enumerate(buffers) if written[i] and _can_be_kept(b)}
        for numbers, alike in _by_type(wanted):
            self._kept.update(zip(numbers, _pieces(_flat(alike), alike), strict=True))

    def take_back(self, flag: Tensor) -> None:
        """Restore the buffers if ``flag`` is not zero, without reading it on the host."""
        buffers = self._buffers()
        marks = zip(self._marks, map(_mark, buffers), strict=True)
        known = self._certain if self._written is None else self._written
        self._written = [was or old != new for was, (old, new) in zip(known, marks, strict=True)]
        now = {i: b for i, b in enumerate(buffers) if i in self._kept and self._written[i] and _can_be_kept(b)}
        same = {i: b for i, b in now.items() if _form(b) == _form(self._kept[i]) and b.device.type == flag.device.type}
        for numbers, alike in _by_type(same):
            kept = _flat([self._kept[number] for number in numbers])
            chosen = torch.where(flag.to(kept.device) > 0, kept, _flat(alike))
            with torch.no_grad():
                torch._foreach_copy_(alike, _pieces(chosen, alike))
        self._kept = {}

    def _buffers(self) -> list[Tensor | None]:
        return [_buffer(*place) for place in self._places]


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    buffers = module._buffers  # TorchScript's are no dict, and have no `get`
    if name not in buffers:
        return None
    return buffers[name]


def _can_be_kept(buffer: Tensor | None) -> TypeIs[Tensor]:
    # An inference tensor has no version, and is not written in a step.
    if type(buffer) is not Tensor or buffer.is_inference():
        return False
    return buffer.layout is torch.strided and not (buffer.is_nested or buffer.is_quantized)


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    return id(buffer), count_writes(buffer) if _can_be_kept(buffer) else -1


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _by_type(buffers: Mapping[int, Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Group buffers by dtype and device, for one kernel each; return their indices and tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, buffer in buffers.items():
        groups.setdefault((buffer.dtype, buffer.device), []).append(number)
    return [(numbers, [buffers[number] for number in numbers]) for numbers in groups.values()]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
