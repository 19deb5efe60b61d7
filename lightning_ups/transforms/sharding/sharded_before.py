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

__all__ = [
    "GatherOptions",
    "ShardRecord",
    "check_same",
    "layout_of",
    "recall",
    "refuse_hooks_after",
    "refuse_lazy",
    "refuse_one_memory",
    "remember",
]

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


def check_same(model: nn.Module, *, before: Any, now: Any, layout_before: Any, layout: Any) -> None:
    """Raise if ``model`` was sharded in another way than requested now.

    Args:
        model: A model that an earlier run sharded.
        before: A dataclass of the earlier options.
        now: The options of this run.
        layout_before: The mesh of the earlier run.
        layout: The mesh of this one.
    """
    if type(before) is not type(now):
        raise ValueError(
            f"{type(model).__name__} was sharded by an earlier run with another strategy."
            " Sharding stays on a module, and each strategy shards differently."
            " Keep the strategy of the earlier run, or create a new module and load a checkpoint."
        )
    earlier = {f.name: getattr(before, f.name) for f in fields(before)} | {"mesh": layout_before}
    asked = {f.name: getattr(now, f.name) for f in fields(now)} | {"mesh": layout}
    different = [name for name in asked if earlier[name] != asked[name]]
    if different:
        precision = all(name.endswith("_dtype") or name == "autocast" for name in different)
        raise ValueError(
            f"{type(model).__name__} was sharded by an earlier run with"
            f" {', '.join(f'{name}={earlier[name]}' for name in different)}, and this run asks for"
            f" {', '.join(f'{name}={asked[name]}' for name in different)}."
            " Sharding stays on a module, and how it was done cannot be changed."
            f" Keep the {'precision' if precision else 'settings'} of the earlier run,"
            " or build the module anew and load a checkpoint."
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raise if a parameter of ``model`` has no shape yet."""
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ValueError(
            f"The parameter {lazy[0]} has no shape yet."
            " It belongs to a lazy module, which gets its shape from the first batch, after sharding."
            " Run one batch through the module before fit, or use a module with explicit sizes."
        )


def refuse_one_memory(model: nn.Module) -> None:
    """Raise if two parameters of ``model`` share memory."""
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in model.named_parameters()
        if type(p) is nn.Parameter and p.layout is torch.strided and p.is_contiguous() and p.numel() and p.data_ptr()
    )
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end:
            raise ValueError(
                f"{name} and {other} are two parameters that share memory, as after `a.data = b.data`."
                " Each would get its own shards, so one weight would be trained as two."
                " Share the parameter itself: `a.weight = b.weight`."
            )


def refuse_hooks_after(model: nn.Module) -> None:
    """Raise if a parameter of ``model`` has a hook that runs when its gradient has been accumulated."""
    if hooked := [name for name, p in model.named_parameters() if has_hooks_after_accumulation(p)]:
        raise ValueError(
            f"{hooked[0]} has a hook that runs when its gradient has been accumulated."
            " There the gradient is that of one device's part of the batch, and not yet reduced or sharded."
            " Move the code of the hook to on_before_optimizer_step, or train without sharding."
        )
