"""A module's twin, and a batch's, without numbers in them: they have its shapes and types, and take no memory."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.rehearsal import FakeTensorMode

__all__ = ["batch_size", "fake_batch", "resized", "sequence_length", "twin"]


def twin(
    module: nn.Module, *, mode: FakeTensorMode | None, dtype: torch.dtype | None = None, without: Any = None
) -> nn.Module:
    """Return a copy of ``module`` whose tensors are fake ones of ``mode``; nothing of its weights is copied.

    What else the module holds and is no container, such as a data set, is not copied either, but shared.

    Args:
        module: It may be on the meta device, or anywhere else.
        mode: What fakes. None: the copy is on the meta device.
        dtype: Of the twin's parameters of floating point; None: as they are.
        without: An object that the module refers to, such as its Trainer, and the copy shall not: it has None there.

    Raises:
        ValueError: If the module is sharded, or has tensors of a kind that cannot be faked.
    """
    memo: dict[int, Any] = {} if without is None else {id(without): None}
    for tensor in _tensors(module):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{type(module).__name__} is sharded already."
                " A plan begins with the module as it was built, and decides by itself what lies where."
                " Plan with a module that has not been given to a strategy."
            )
        memo[id(tensor)] = _faked(tensor, mode, dtype)
    for value in _shared(module):
        memo.setdefault(id(value), value)
    other = copy.deepcopy(module, memo)
    for inner in other.modules():
        if isinstance(inner, nn.RNNBase):  # it has its weights a second time, in a list
            inner._flat_weights = [getattr(inner, name) for name in inner._flat_weights_names]
        # Where it believes to be, as a LightningModule does, is where it makes new tensors.
        vars(inner).update({name: _device(mode) for name, v in vars(inner).items() if isinstance(v, torch.device)})
    return other


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _shared(module: nn.Module) -> Iterator[Any]:
    for inner in module.modules():
        for value in vars(inner).values():
            if not isinstance(value, nn.Module | Tensor | dict | list | tuple | set) and not callable(value):
                yield value


def _faked(tensor: Tensor, mode: FakeTensorMode | None, dtype: torch.dtype | None) -> Tensor:
    parameter = isinstance(tensor, nn.Parameter)
    wanted = dtype if parameter and dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode or nullcontext():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=_device(mode))
        if not parameter:
            return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():  # such as marks that tell an optimizer what not to decay
        if not name.startswith("__"):
            setattr(fake, name, value)
    return fake


def _device(mode: FakeTensorMode | None) -> torch.device:
    return torch.device("meta" if mode is None else "cpu")


def fake_batch(batch: Any, *, mode: FakeTensorMode | None) -> Any:
    """Return ``batch`` with fake tensors in it, or, without a mode, with some on the meta device."""
    return apply_to_collection(batch, Tensor, lambda tensor: _faked(tensor.detach(), mode, None))


def batch_size(batch: Any) -> int | None:
    """Return the length of the first dimension that most tensors of ``batch`` have, or None if it has none."""
    sizes = [tensor.shape[0] for tensor in _found(batch) if tensor.dim()]
    return max(set(sizes), key=sizes.count) if sizes else None


def sequence_length(batch: Any) -> int | None:
    """Return the length of the sequences in ``batch``: of the second dimension of its integer tensors, or None."""
    sizes = [tensor.shape[1] for tensor in _found(batch) if tensor.dim() >= 2 and not tensor.is_floating_point()]
    return max(set(sizes), key=sizes.count) if sizes else None


def resized(batch: Any, *, samples: int | None = None, tokens: int | None = None) -> Any:
    """Return a batch like ``batch`` with another number of samples, or with sequences of another length; it is empty.

    Args:
        batch: What is like it.
        samples: The length of the first dimension, where it is that of the batch. None: as it is.
        tokens: The length of the dimensions that are as long as the sequence. None: as it is.
    """
    size, length = batch_size(batch), sequence_length(batch)

    def other(tensor: Tensor) -> Tensor:
        shape = [*tensor.shape]
        if samples is not None and shape and shape[0] == size:
            shape[0] = samples
        if tokens is not None:
            shape = [*shape[:1], *(tokens if n == length else n for n in shape[1:])]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return apply_to_collection(batch, Tensor, other)


def _found(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found
