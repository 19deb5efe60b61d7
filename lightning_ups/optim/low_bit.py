"""Optimizers that keep their state in eight or four bits: saved as what they are, under every strategy.

A tensor of codes and scales has a class of its own, which checkpoints that are sharded, or made for another number of
devices, do not know: they would keep its values, and resume with a state of 32 bits. Here a state dict holds codes and
scales as plain tensors, or as shards of those, and a state dict that is loaded may hold either.
"""

import importlib
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.optim.delegating import innermost

_MODULES = {  # of torchao
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KINDS = ("AdamW8bit", "Adam8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")
_LEAST = 4096  # numbers: what has fewer is kept in full
_HOOKED = "_low_bit_state_is_portable"


def is_low_bit(value: Any) -> bool:
    """Return whether ``value``, or this rank's part of it, is made of codes and scales."""
    local = local_of(value)
    return type(local).__name__ in _MODULES and type(local).__module__.startswith("torchao.")


def make_portable(optimizers: Iterable[Optimizer]) -> None:
    """Let state dicts of those ``optimizers`` that have low-bit state hold plain tensors, and load such.

    Raises:
        ValueError: If one is of bitsandbytes and was given shards.
    """
    for optimizer in map(innermost, optimizers):
        _refuse_shards_of_bitsandbytes(optimizer)
        if any(map(_is_torchaos, type(optimizer).__mro__)) and not getattr(optimizer, _HOOKED, False):
            setattr(optimizer, _HOOKED, True)
            optimizer.register_state_dict_post_hook(_apart)
            optimizer.register_load_state_dict_pre_hook(_together)


def make_state_alone(optimizer: Optimizer, *, in_eight_bits: bool = False) -> Optimizer:
    """Let a step of ``optimizer``, if it has low-bit state, make that and no more; for tensors without numbers.

    Its own step is compiled, and takes nothing besides; and it computes its table of codes from numbers.

    Args:
        optimizer: Of any class.
        in_eight_bits: Make the state that torchao's AdamW8bit has over the same parameters, whatever it is.
    """
    kinds = (base.__name__ for base in type(optimizer).__mro__ if _is_torchaos(base))
    name = "AdamW8bit" if in_eight_bits else next(kinds, None)
    if name is None:
        return optimizer
    bits, table = (4, 16) if "4bit" in name else (8, 0 if "Fp8" in name else 256)
    blocks = 256 if in_eight_bits else optimizer.block_size  # type: ignore[attr-defined]

    def average(parameter: Tensor, block_size: int) -> Any:
        local = local_of(parameter)
        if local.numel() < _LEAST or local.numel() % block_size:
            return torch.zeros_like(local)
        codes = local.new_empty(local.numel() * bits // 8, dtype=torch.uint8)
        return codes, local.new_empty(local.numel() // block_size + table, dtype=torch.float32)

    def step(*_: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            largest = group.get("amsgrad") and not in_eight_bits
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if largest else [])]
            for p in group["params"]:
                if p.grad is not None and p not in optimizer.state:
                    optimizer.state[p] = {each: average(p, blocks) for each in names}

    vars(optimizer)["step"] = step
    return optimizer


def _is_torchaos(kind: type) -> bool:
    return kind.__module__.startswith("torchao.") and kind.__name__ in _KINDS


def check_rounding(optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer with stochastic rounding that has no bfloat16 weights to round into."""
    for optimizer in map(innermost, optimizers):
        asked = getattr(optimizer, "bf16_stochastic_round", False)
        if asked and all(p.dtype is not torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} has bf16_stochastic_round=True and steps no bfloat16 weight."
                " Float32 weights and masters need no rounding: the option would do nothing."
                " Use BF16WeightsPrecision(), whose weights are bfloat16 and have no masters, or leave the option out."
            )


def _refuse_shards_of_bitsandbytes(optimizer: Optimizer) -> None:
    ours = any(base.__module__.startswith("bitsandbytes.") for base in type(optimizer).__mro__)
    if ours and any(isinstance(p, DTensor) for p in _parameters(optimizer)):
        raise ValueError(
            f"bitsandbytes' {type(optimizer).__name__} was given sharded parameters, which its kernels do not know."
            f" Use torchao.optim.{type(optimizer).__name__}, or a strategy that does not shard."
        )


def _apart(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = _parameters(optimizer)
    state = {
        number: _entries_apart(entries, parameters[number], number) if isinstance(number, int) else entries
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _entries_apart(entries: dict[str, Any], parameter: Tensor, number: int) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for name, value in entries.items():
        if not is_low_bit(value):
            new[name] = value
            continue
        local = local_of(value)
        signed = "signed" if getattr(local, "signed", True) else "unsigned"
        new[f"{name}.form"] = f"{type(local).__name__} {signed} {local.block_size}"
        codes = local.codes.view(torch.uint8)
        for part, tensor in (("codes", codes), ("scale", local.scale)):
            rows = _in_rows(tensor, local.shape, local.block_size, parameter, number)
            new[f"{name}.{part}"] = _as_shard(rows, value) if isinstance(value, DTensor) else rows
    return new


def _in_rows(tensor: Tensor, shape: Sequence[int], block_size: int, parameter: Tensor, number: int) -> Tensor:
    # By rows, so that codes and scales are cut where their parameter is, whatever the number of devices.
    if prod(shape[1:]) % block_size == 0:
        return tensor.view(shape[0], -1)
    if isinstance(parameter, DTensor) and parameter.numel() != prod(shape) * parameter.device_mesh.size():
        raise ValueError(
            f"The low-bit state of parameter {number}, of shape {tuple(parameter.shape)}, cannot be saved in shards:"
            f" its rows are no multiple of the {block_size} numbers of a scale, and devices hold unequal parts of it."
            " Save on one device, use sharding='none', or give such parameters an optimizer of 32 bits."
        )
    return tensor.reshape(-1)


def _as_shard(local: Tensor, like: DTensor) -> DTensor:
    size = [*local.shape]
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            by_rows = placement.dim == 0 and local.dim() > 1
            size[placement.dim] = like.shape[0] if by_rows else size[placement.dim] * like.device_mesh.size(dim)
    stride = [prod(size[i + 1 :]) for i in range(len(size))]
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(size), stride=tuple(stride)
    )


def _together(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, _parameters(optimizer), strict=False))
    state = {
        number: _entries_together(entries, parameters[number]) if number in parameters else entries
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _entries_together(entries: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    new: dict[str, Any] = {}
    parameter = getattr(parameter, "stands_for", parameter)
    for name, value in entries.items():
        stem, _, part = name.rpartition(".")
        if part == "form":
            new[stem] = _rebuilt(value, entries[f"{stem}.codes"], entries[f"{stem}.scale"], parameter)
        elif not (stem and part in ("codes", "scale") and f"{stem}.form" in entries):
            new[name] = value
    return new


def _rebuilt(form: str, codes: Tensor, scale: Tensor, parameter: Tensor) -> Tensor:
    name, signed, block_size = form.split()
    kind = getattr(importlib.import_module(_MODULES[name]), name)
    mine, scales = _local_part(codes, parameter), _local_part(scale, parameter)
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    options = {} if name == "OptimStateFp8" else {"signed": signed == "signed"}
    state = kind.zeros(shape, block_size=int(block_size), device=mine.device, dtype=parameter.dtype, **options)
    state.codes.view(torch.uint8).view(-1).copy_(mine.reshape(-1))
    state.scale.copy_(scales.reshape(-1))
    if not isinstance(parameter, DTensor):
        return state
    return DTensor.from_local(
        state,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor):
        return tensor.redistribute(parameter.device_mesh, parameter.placements).to_local()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        whole = DTensor.from_local(tensor.to(mesh.device_type), mesh, run_check=False)
        return whole.redistribute(mesh, parameter.placements).to_local()
    return tensor


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
