"""The dtypes in which the layers of a model keep their parameters and compute.

One tiny operation for each class of layer runs in the context of the steps, and its result has the dtype. Hooks would
be traced by the compiler, and removing them would cause recompilation.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from inspect import getattr_static
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import sharding_policy

__all__ = ["layer_dtypes", "shown"]


def layer_dtypes(
    model: nn.Module,
    *,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    cast: torch.dtype | None = None,
) -> dict[str, dict[str, int]]:
    """Count the layers with parameters, by class and by the dtypes of parameters and computation.

    The dtype of computation is known for layers with a forward of ``torch.nn``. For others only the policy is known:
    ``autocast bfloat16`` or ``cast bfloat16``.

    Args:
        model: The model.
        device: The device of the layers.
        context: The context of the steps, such as a precision's ``forward_context``.
        cast: The dtype to which a wrapper of the whole model casts parameters.
    """
    counts: dict[str, Counter[str]] = {}
    with torch.no_grad(), context():
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        for module, policy in _with_policy(model, cast):
            dtypes = dict.fromkeys(p.dtype for p in module.parameters(recurse=False))
            if dtypes:
                said = _description(module, [*dtypes], autocast=autocast, cast=policy, device=device)
                counts.setdefault(_kind(module).__name__, Counter())[said] += 1
    return {name: dict(counts[name]) for name in sorted(counts)}


def shown(dtype: torch.dtype) -> str:
    """Return the name of a dtype as in YAML, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _kind(module: nn.Module) -> type[nn.Module]:
    # `fully_shard` gives each module a new class that inherits from FSDPModule and the user's class.
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


def _with_policy(
    module: nn.Module, policy: torch.dtype | None, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    # FSDP2 casts by the policy of the innermost sharded module that contains the layer.
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, FSDPModule):
        policy = sharding_policy(module).param_dtype
    yield module, policy
    for child in module.children():
        yield from _with_policy(child, policy, seen)


def _description(
    module: nn.Module,
    dtypes: list[torch.dtype],
    *,
    autocast: torch.dtype | None,
    cast: torch.dtype | None,
    device: torch.device,
) -> str:
    said = f"param {'+'.join(map(shown, dtypes))}"
    target = getattr(getattr(getattr(module, "config", None), "cast_config_input", None), "target_dtype", None)
    if isinstance(target, torch.dtype):  # torchao's Float8Linear
        return f"{said}, compute {shown(target)}"
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if (operation := _operation(_kind(module))) and len(floating) == 1:
        make = {"device": device, "dtype": cast or floating[0]}
        return f"{said}, compute {shown(operation(make).dtype)}"
    if cast is not None:
        said += f", cast {shown(cast)}"
    if autocast is not None:
        said += f", autocast {shown(autocast)}"
    return said


def _operation(kind: type[nn.Module]) -> "_Operation | None":
    # A subclass that does not override forward computes as its base.
    forward = getattr_static(kind, "forward", None)  # a scripted module has its forward on the instance
    return next((run for base, run in _OPERATIONS.items() if forward is getattr_static(base, "forward")), None)


_Operation = Callable[[Mapping[str, Any]], Tensor]


def _ones(make: Mapping[str, Any], *shape: int) -> Tensor:
    return torch.ones(shape, **make)


def _convolution(function: Callable[..., Tensor], dims: int) -> _Operation:
    return lambda make: function(_ones(make, *[1] * (dims + 2)), _ones(make, *[1] * (dims + 2)))


def _batch_norm(make: Mapping[str, Any]) -> Tensor:
    return F.batch_norm(_ones(make, 2, 1), _ones(make, 1), _ones(make, 1), _ones(make, 1), _ones(make, 1))


_OPERATIONS: dict[type[nn.Module], _Operation] = {
    nn.Linear: lambda make: F.linear(_ones(make, 1, 1), _ones(make, 1, 1)),
    nn.Bilinear: lambda make: F.bilinear(_ones(make, 1, 1), _ones(make, 1, 1), _ones(make, 1, 1, 1)),
    nn.Embedding: lambda make: F.embedding(torch.zeros(1, dtype=torch.long, device=make["device"]), _ones(make, 1, 1)),
    nn.Conv1d: _convolution(F.conv1d, 1),
    nn.Conv2d: _convolution(F.conv2d, 2),
    nn.Conv3d: _convolution(F.conv3d, 3),
    nn.ConvTranspose1d: _convolution(F.conv_transpose1d, 1),
    nn.ConvTranspose2d: _convolution(F.conv_transpose2d, 2),
    nn.ConvTranspose3d: _convolution(F.conv_transpose3d, 3),
    nn.LayerNorm: lambda make: F.layer_norm(_ones(make, 1, 1), [1], _ones(make, 1)),
    nn.RMSNorm: lambda make: F.rms_norm(_ones(make, 1, 1), [1], _ones(make, 1)),
    nn.GroupNorm: lambda make: F.group_norm(_ones(make, 1, 1, 2), 1, _ones(make, 1)),
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
}
