"""Tensors in the objects that modules return, where FSDP2 by itself looks into containers only."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.patches import STATE, installed
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo

__all__ = ["find_in_objects"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Module)
_DEPTH = 4  # a graph of PyTorch Geometric keeps its tensors in a mapping of a store


def find_in_objects(state: Any) -> None:
    """Let ``state`` gather for the backward of tensors that its module returns as attributes of objects, too."""
    target = f"{STATE}._register_pre_backward_hook"
    installed(target, state, lambda stock: hidden_from_dynamo(partial(_register, state, stock)))


def _register(state: Any, register: Callable[[Any], Any], output: Any) -> Any:
    result = register(output)
    if torch.is_grad_enabled():
        for tensor in _in_objects(result):
            tensor.register_hook(state._pre_backward)
    return result


def _in_objects(output: Any) -> Iterator[Tensor]:
    """Yield the tensors that need gradients in what is neither a tensor nor a container, each once."""
    seen: set[int] = set()
    level = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, Tensor)]
    for _ in range(_DEPTH):
        objects = [value for value in level if not isinstance(value, _PLAIN) and id(value) not in seen]
        seen.update(map(id, objects))
        level = [leaf for value in objects for leaf in tree_leaves(_attributes(value))]
        for leaf in level:
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
        level = [leaf for leaf in level if not isinstance(leaf, Tensor)]


def _attributes(value: Any) -> dict[str, Any]:
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
