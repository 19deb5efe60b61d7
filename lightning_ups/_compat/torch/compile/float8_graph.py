"""Casts to float8 in a compiled graph, with less to do for each value and the same bits.

Such a cast follows a maximum of what is cast, by which it is scaled. So nothing is left for torchao's clamps to do; and
the maximum of what was joined is that of the parts, which are found where they lie.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ups._compat.torch.compile.graph_nodes import above, is_cast, is_view, packet_of
from lightning_ups._compat.torch.compile.inductor import even_splits, graph_pass

__all__ = ["find_maxima_apart", "leaner_casts", "leave_out_clamps"]

_aten = torch.ops.aten
_LEAST = 1e-12  # of a maximum, as torchao has it: what it is divided by must not be less
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@contextmanager
def leaner_casts() -> Iterator[None]:
    """Compile casts to float8 so while the context is open."""
    with even_splits(), graph_pass("joint", leave_out_clamps), graph_pass("apart", find_maxima_apart):
        yield


def leave_out_clamps(graph: fx.Graph) -> None:
    """Cast to float8 without clamps what was scaled by its own maximum to the largest value that there is.

    A scaled maximum is that value but for the rounding of the scale, at most 2**-8, and float8 rounds all to it that is
    less than 2**-5 above. What is not a number stays so, with clamps and without.
    """
    for cast in [node for node in graph.nodes if is_cast(node) and _dtype(node) in _FLOAT8]:
        clamped, largest = cast.args[0], torch.finfo(_dtype(cast)).max
        scaled = _argument(_argument(clamped, _aten.clamp_max.default, largest), _aten.clamp_min.default, -largest)
        if isinstance(scaled, fx.Node) and _is_scaled_by_its_maximum(scaled, largest):
            cast.replace_input_with(clamped, scaled)
            _erase_unused(graph, clamped)


def _argument(node: Any, target: Any, *rest: Any) -> Any:
    """Return the first argument of ``node``, or None if it is not this ``target`` with this ``rest`` of arguments."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is target and node.args[1:] == rest else None


def _is_scaled_by_its_maximum(scaled: fx.Node, largest: float) -> bool:
    if scaled.target is not _aten.mul.Tensor:
        return False
    return any(
        (maximum := _maximum_of(scale, largest)) is not None and maximum is above(value, _keeps_values)
        for value, scale in (scaled.args, reversed(scaled.args))
    )


def _maximum_of(scale: Any, largest: float) -> fx.Node | None:
    """Return the values by whose largest ``scale`` was made, which brings it to ``largest``."""
    floor = _argument(_argument(above(scale, _is_exact), _aten.mul.Tensor, largest), _aten.reciprocal.default)
    if not isinstance(floor, fx.Node) or floor.target is not _aten.clamp_min.default:
        return None
    bounded, least = floor.args
    if not isinstance(least, float) or least < _LEAST:
        return None
    source = above(_absolute(above(bounded, _is_exact)), _keeps_values)
    return source if isinstance(source, fx.Node) else None


def _absolute(maximum: Any) -> Any:
    return _argument(_argument(maximum, _aten.max.default), _aten.abs.default)


def _is_exact(node: fx.Node) -> bool:
    """Return whether it casts to float32 or float64, which round a scale by less than the clamps leave room for."""
    return is_cast(node) and _dtype(node) in (torch.float32, torch.float64)


def _keeps_values(node: fx.Node) -> bool:
    """Return whether it has the values of its argument, in another shape or, without loss, in another type."""
    return _only_shows(node) or _widens(node)


def _only_shows(node: fx.Node) -> bool:
    return is_view(node) or packet_of(node) is _aten.unsqueeze


def _widens(node: fx.Node) -> bool:
    source = node.args[0] if is_cast(node) else None
    return isinstance(source, fx.Node) and torch.promote_types(_dtype(source), _dtype(node)) == _dtype(node)


def find_maxima_apart(graph: fx.Graph) -> None:
    """Look for the largest of joined values in each of the parts, which can be read in the order in which it lies."""
    for node in graph.find_nodes(op="call_function", target=_aten.max.default):
        joined = above(_absolute(node), _only_shows)
        if not isinstance(joined, fx.Node) or joined.target is not _aten.cat.default:
            continue
        parts: Any = joined.args[0]
        if not all(map(_has_values, parts)):
            continue
        with graph.inserting_before(node):
            maxima = [_new(graph, _aten.max.default, _new(graph, _aten.abs.default, part)) for part in parts]
            largest, *others = maxima
            for other in others:
                largest = _new(graph, _aten.maximum.default, largest, other)
        absolute = node.args[0]
        node.replace_all_uses_with(largest)
        graph.erase_node(node)
        _erase_unused(graph, absolute)


def _has_values(node: fx.Node) -> bool:
    """Return whether it is known to have any: what is empty has no maximum."""
    shape = _value(node).shape
    return all(isinstance(size, int) for size in shape) and 0 not in shape


def _new(graph: fx.Graph, target: Callable[..., Any], *args: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(_value(arg) for arg in args))
    return node


def _erase_unused(graph: fx.Graph, node: Any) -> None:
    while isinstance(node, fx.Node) and node.op == "call_function" and not node.users:
        above = node.args[0]
        graph.erase_node(node)
        node = above


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None
