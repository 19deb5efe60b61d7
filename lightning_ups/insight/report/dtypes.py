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
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import skip_init

from lightning_ups._compat.torch.fsdp.state import sharding_policy


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


def dtype_name(dtype: torch.dtype) -> str:
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
    said = f"param {'+'.join(map(dtype_name, dtypes))}"
    target = getattr(getattr(getattr(module, "config", None), "cast_config_input", None), "target_dtype", None)
    if isinstance(target, torch.dtype):  # torchao's Float8Linear
        return f"{said}, compute {dtype_name(target)}"
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floating) == 1:
        computed = _computed_dtype(_kind(module), {"device": device, "dtype": cast or floating[0]})
        if computed is not None:
            return f"{said}, compute {dtype_name(computed)}"
    if cast is not None:
        said += f", cast {dtype_name(cast)}"
    if autocast is not None:
        said += f", autocast {dtype_name(autocast)}"
    return said


def _computed_dtype(kind: type[nn.Module], make: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result of a tiny layer with the forward of ``kind``, or None if that is not torch's."""
    # A subclass that does not override forward computes as its base. A scripted module has its forward on the instance.
    forward = getattr_static(kind, "forward", None)
    base = next((base for base in _SHAPES if forward is getattr_static(base, "forward")), None)
    if base is None:
        return None
    arguments, *shapes = _SHAPES[base]
    layer = skip_init(base, *arguments, **make)
    if base is nn.Embedding:
        return layer(torch.zeros(1, dtype=torch.long, device=make["device"])).dtype
    return layer(*(torch.ones(shape, **make) for shape in shapes)).dtype


_SHAPES: dict[type[nn.Module], tuple[tuple[int, ...], ...]] = {  # arguments of a layer, shapes of its inputs
    nn.Linear: ((1, 1), (1, 1)),
    nn.Bilinear: ((1, 1, 1), (1, 1), (1, 1)),
    nn.Embedding: ((1, 1), (1,)),
    nn.Conv1d: ((1, 1, 1), (1, 1, 1)),
    nn.Conv2d: ((1, 1, 1), (1, 1, 1, 1)),
    nn.Conv3d: ((1, 1, 1), (1, 1, 1, 1, 1)),
    nn.ConvTranspose1d: ((1, 1, 1), (1, 1, 1)),
    nn.ConvTranspose2d: ((1, 1, 1), (1, 1, 1, 1)),
    nn.ConvTranspose3d: ((1, 1, 1), (1, 1, 1, 1, 1)),
    nn.LayerNorm: ((1,), (1, 1)),
    nn.RMSNorm: ((1,), (1, 1)),
    nn.GroupNorm: ((1, 1), (1, 1, 2)),
    nn.BatchNorm1d: ((1,), (2, 1)),
    nn.BatchNorm2d: ((1,), (2, 1, 1, 1)),
    nn.BatchNorm3d: ((1,), (2, 1, 1, 1, 1)),
}
