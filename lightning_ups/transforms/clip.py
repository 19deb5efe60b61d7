"""Clipping gradients by their true norm, without waiting for the device."""

from collections.abc import Iterable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

__all__ = ["TakesClipCoefficient", "clip_by_value", "clip_coefficient", "scale_gradients", "total_norm"]


@runtime_checkable
class TakesClipCoefficient(Protocol):
    """An optimizer that multiplies the gradients while it reads them, and so saves a pass over them."""

    def take_clip_coefficient(self, coefficient: Tensor) -> None:
        """Multiply the gradients of the next step by ``coefficient``."""
        ...


def total_norm(parameters: Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, a tensor on their device, equal on every rank.

    Gradients may be whole, or sharded over one mesh or several: each group is reduced over its own mesh.
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            # Foreach norms want one device and one mesh.
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            groups.setdefault((gradient.device, mesh), []).append(gradient)
    norms = [_whole(get_total_norm(gradients, norm_type)) for gradients in groups.values()]
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float32) for norm in norms]), norm_type)


def clip_coefficient(norm: Tensor, *, max_norm: float) -> Tensor:
    """Return what gradients of ``norm`` are multiplied by, at most 1, computed as torch does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(parameters: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply every gradient by ``coefficient``, in place."""
    groups: dict[torch.device, list[Tensor]] = {}
    for gradient in _local_gradients(parameters):
        groups.setdefault(gradient.device, []).append(gradient)
    for device, gradients in groups.items():
        torch._foreach_mul_(gradients, coefficient.to(device, non_blocking=True))


def clip_by_value(parameters: Iterable[Tensor], *, limit: float) -> None:
    """Clamp every element of every gradient to ``[-limit, limit]``, in place."""
    gradients = _local_gradients(parameters)
    if gradients:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients = (parameter.grad for parameter in parameters)
    return [_local(gradient) for gradient in gradients if gradient is not None]


def _local(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
