"""Maxima of matrices in a compiled graph, found by the kernels that write these.

An operator that looks for the largest magnitudes of a matrix reads all of it once more. Where inductor itself writes
the matrix, the kernel that does so can find the largest of each piece, which inductor joins to it: then the operator
has but those to read. A maximum is exact, and rounding keeps the order of values, so that its bits are the same.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from lightning_ups._compat.torch.compile.graph_nodes import above, is_cast, is_view, packet_of

__all__ = ["find_where_written", "pieces"]

_aten = torch.ops.aten
_BROADCASTS = (_aten.expand, _aten.unsqueeze, _aten.squeeze)
LONGEST = 1024  # what inductor reduces at once, without a loop: of two bytes each, 32 to a thread of one warp
SHORTEST = 128  # or else the maxima are no small part of what is written
FEWEST = 1024  # programs, for one piece each: with fewer a GPU is not busy, and inductor would split them


def find_where_written(graph: fx.Graph, maxima: OpOverload) -> None:
    """Let calls of ``maxima`` read the maxima of pieces where the kernel that writes a matrix can find these."""
    for node in graph.find_nodes(op="call_function", target=maxima):
        values = node.args[0]
        shape = pieces(values)
        if shape is None:
            continue
        with graph.inserting_before(node):
            # Of what the launch of a cast reads, and not of what that shows: inductor keeps the one in memory, and
            # would compute the other a second time.
            shown = _new(graph, _aten.view.default, values, [*shape])
            largest = _new(graph, _aten.amax.default, _new(graph, _aten.abs.default, shown), [-1])
            found = _new(graph, maxima, largest)  # anew: a call of an operator knows the strides that it is made with
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def pieces(values: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of ``values`` whose last dimension is one piece, or None where inductor would read them again.

    Inductor joins loops that are equal: where rows are reduced to compute ``values``, as in a norm, a piece is a row.
    """
    if not _size(values):
        return None
    shape = tuple(_value(values).shape)
    source, width = above(values, _keeps_order), shape[-1]
    computed = above(source, lambda node: packet_of(node) is _aten.clone or is_view(node))
    if not _is_elementwise(computed) or not _value(source).is_contiguous():
        return None
    rows, length, reduced = tuple(_value(source).shape), math.gcd(width, LONGEST), _reduced_lengths(source)
    if not reduced and length >= SHORTEST:
        outer = rows if rows[-1] == width else shape  # as many loops, or inductor does not see that they match
        found = (*outer[:-1], width // length, length)
    elif reduced <= {width} and rows[-1] == width:
        found = rows
    else:
        return None
    return found if math.prod(found[:-1]) >= FEWEST else None


def _keeps_order(node: fx.Node) -> bool:
    return is_view(node) and packet_of(node) not in (_aten.t, _aten.transpose, _aten.permute)


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether inductor writes it value by value."""
    return is_cast(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _only_shows(node: fx.Node) -> bool:
    return is_view(node) or node.target is operator.getitem or packet_of(node) in _BROADCASTS


def _reduced_lengths(source: fx.Node) -> set[int]:
    """Return how many values of the size of ``source`` are reduced to one where it is computed."""
    size, lengths, seen, left = _size(source), set[int](), set[fx.Node](), [source]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if torch.Tag.reduction in getattr(node.target, "tags", ()):
            if _size(node.all_input_nodes[0]) == size and (num_results := _size(node)):
                lengths.add(size // num_results)
        elif _is_elementwise(node) or _only_shows(node):
            left += node.all_input_nodes
    return lengths


def _new(graph: fx.Graph, target: OpOverload, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(_value(arg) if isinstance(arg, fx.Node) else arg for arg in args))
    return node


def _size(node: fx.Node) -> int:
    """Return how many values there are, or 0 where that is not known."""
    shape = _value(node).shape
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else 0


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return value if isinstance(value, Tensor) else value[0]
