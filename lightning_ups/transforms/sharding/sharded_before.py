"""Checks a model that an earlier run has sharded: the same sharding is kept, any other is refused."""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from lightning_ups._compat.torch.tensors.tensors import has_hooks_after_accumulation
from lightning_ups.transforms.on_module import OnModule

_RECORD = OnModule[Any]("sharded")


@dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """The dtypes in which parameters are gathered and gradients are reduced.

    Args:
        param_dtype: The dtype in which parameters are gathered, and modules compute; None: their own.
        autocast: Operators choose their dtype: only the weights of matrix products are gathered in ``param_dtype``, and
            nothing else is cast.
        reduce_dtype: The dtype in which gradients are reduced; None: that in which they are computed.
        output_dtype: The dtype of the outputs of roots; None: unchanged.
        in_float32: Patterns of submodules whose parameters and inputs are not cast.
    """

    param_dtype: torch.dtype | None = None
    autocast: bool = False
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    in_float32: tuple[str, ...] = ()

    @property
    def module_dtype(self) -> torch.dtype | None:
        """The dtype to which modules cast their parameters and inputs; None: no casts."""
        return None if self.autocast else self.param_dtype


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """How a model was sharded.

    Args:
        layout: The names and sizes of the mesh's dimensions.
        blocks: The names of modules that are gathered together.
        replicated: Parameters that are not sharded, by name.
        share_of_blocks: The blocks' share of the bytes of all parameters.
    """

    layout: tuple[tuple[str, int], ...]
    blocks: tuple[str, ...]
    replicated: dict[str, nn.Parameter]
    share_of_blocks: float


def layout_of(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """Return the names and sizes of the dimensions of ``mesh``."""
    return tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))


def remember(model: nn.Module, record: Any) -> None:
    """Store ``record`` on ``model``."""
    _RECORD.keep(model, record)


def recall(model: nn.Module) -> Any:
    """Return the record stored on ``model``, or None."""
    return _RECORD.get(model)


def check_same(model: nn.Module, earlier: Any, options: Any, *, layout: Any) -> None:
    """Raise if ``model`` was sharded in another way than requested now.

    Args:
        model: A model that an earlier run sharded.
        earlier: The record of the earlier run.
        options: The options of this run.
        layout: The mesh of this run.
    """
    name, anew = type(model).__name__, "or build the module anew and load a checkpoint."
    if type(earlier.options) is not type(options):
        raise ValueError(
            f"{name} was sharded by an earlier run with another strategy, and sharding stays on a module."
            f" Keep the strategy of the earlier run, {anew}"
        )
    before = {f.name: getattr(earlier.options, f.name) for f in fields(options)} | {"mesh": earlier.layout}
    now = {f.name: getattr(options, f.name) for f in fields(options)} | {"mesh": layout}
    if different := [key for key in now if before[key] != now[key]]:
        precision = all(key.endswith("_dtype") or key == "autocast" for key in different)
        raise ValueError(
            f"{name} was sharded by an earlier run with {', '.join(f'{key}={before[key]}' for key in different)}, and"
            f" this run asks for {', '.join(f'{key}={now[key]}' for key in different)}. Sharding stays on a module."
            f" Keep the {'precision' if precision else 'settings'} of the earlier run, {anew}"
        )


def refuse_unshardable(model: nn.Module) -> None:
    """Raise if a parameter of ``model`` has no shape, shares memory, or has a hook after accumulation."""
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"The parameter {name} has no shape yet: it belongs to a lazy module."
                " Run one batch through the module before fit, or use a module with explicit sizes."
            )
        if has_hooks_after_accumulation(p):
            raise ValueError(
                f"{name} has a hook that runs when its gradient has been accumulated, before it is reduced."
                " Move the code of the hook to on_before_optimizer_step, or train without sharding."
            )
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in parameters.items()
        if type(p) is nn.Parameter and p.layout is torch.strided and p.is_contiguous() and p.numel() and p.data_ptr()
    )
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end:
            raise ValueError(
                f"{name} and {other} are two parameters that share memory, as after `a.data = b.data`, and would be"
                " trained as two. Share the parameter itself: `a.weight = b.weight`."
            )
