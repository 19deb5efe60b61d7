"""Clips gradients by their true norm, without synchronizing."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lightning_ups._compat.torch.tensors.tensors import local_of, whole_of


@runtime_checkable
class TakesClipCoefficient(Protocol):
    """An optimizer that multiplies the gradients in its own kernel, which saves a pass over them."""

    def take_clip_coefficient(self, coefficient: Tensor) -> None:
        """Multiply the gradients of the next step by ``coefficient``."""
        ...


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of ``parameters``, without None."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all ``gradients``, on their device, equal on every rank.

    It is float64 if all of them are, and float32 otherwise. Gradients may be unsharded, or sharded over one mesh or
    several: each group is reduced over its own mesh. For a sparse gradient, rows are coalesced first.
    """
    groups: dict[Any, list[Tensor]] = {}
    for gradient in map(_dense_part, gradients):
        # Foreach norms require one device, one mesh and one dtype.
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault((gradient.device, mesh, gradient.dtype), []).append(gradient)
    norms = [_norm(group, norm_type) for group in groups.values()]
    if not norms:
        return torch.zeros(())
    dtype = torch.float64 if all(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]), norm_type)


def _dense_part(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    if gradients[0].is_complex():  # kernels that take an output dtype require a complex one here
        gradients = [gradient.abs() for gradient in gradients]
    if gradients[0].dtype in (torch.float32, torch.float64) or isinstance(gradients[0], DTensor):
        # For sharded gradients torch would compute them one by one, with a launch or two each on a GPU.
        together = True if gradients[0].device.type == "cuda" else None
        norm = whole_of(get_total_norm(gradients, norm_type, foreach=together))
        return norm if norm.dtype == torch.float64 else norm.float()
    # In the dtype of the gradients, a bfloat16 norm would have eight bits.
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)


def over_stages(norm: Tensor, group: ProcessGroup) -> Tensor:
    """Return the Euclidean norm of the gradients of all ranks of ``group``, of which ``norm`` is this rank's."""
    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_coefficient(norm: Tensor, *, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that scales gradients of ``norm`` to ``max_norm``, computed as torch does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(gradients: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply all ``gradients`` by ``coefficient``, in place."""
    groups: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local_of, gradients):
        groups.setdefault(gradient.device, []).append(gradient)
    for device, group in groups.items():
        torch._foreach_mul_(group, coefficient.to(device, non_blocking=True))


def clip_by_value(gradients: Iterable[Tensor], *, limit: float) -> None:
    """Clamp every element of all ``gradients`` to ``[-limit, limit]``, in place."""
    local = [local_of(gradient) for gradient in gradients]
    if local := [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in local]:
        torch._foreach_clamp_min_(local, -limit)
        torch._foreach_clamp_max_(local, limit)
