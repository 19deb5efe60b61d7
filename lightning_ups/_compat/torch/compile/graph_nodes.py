"""What nodes of a graph are that inductor compiles, and what lies above them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["above", "is_cast", "is_view", "packet_of"]

_aten = torch.ops.aten
_VIEWS = (_aten.t, _aten.transpose, _aten.permute, _aten.view, _aten._unsafe_view, _aten.reshape)
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)


def above(node: Any, goes_on: Callable[[fx.Node], bool]) -> Any:
    """Return the first argument of the first argument and so on, as far as ``goes_on`` says so of what has it."""
    while isinstance(node, fx.Node) and goes_on(node):
        node = node.args[0]
    return node


def is_cast(node: fx.Node) -> bool:
    """Return whether ``node`` is its first argument in another type."""
    return node.target in _CASTS


def is_view(node: fx.Node) -> bool:
    """Return whether ``node`` shows the memory of its first argument in another shape or order."""
    return packet_of(node) in _VIEWS


def packet_of(node: fx.Node) -> Any:
    """Return the operator of ``node`` without its overload, or None."""
    return getattr(node.target, "overloadpacket", None)
