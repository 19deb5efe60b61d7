"""Passes over the graphs that inductor compiles: casts to float8, maxima, and the input of a reduction.

All keep every bit. A cast to float8 follows a maximum of what is cast, by which it is scaled, so torchao's clamps have
no effect. The maximum of joined tensors is that of the parts. If inductor itself writes a matrix, that kernel can find
the largest value of each piece. And a cast may be done while gradients are copied together for their reduction.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from lightning_ups._compat.torch.compile.inductor import even_splits, graph_pass

__all__ = [
    "above",
    "cast_where_copied",
    "copy_together",
    "find_maxima_apart",
    "find_where_written",
    "is_cast",
    "is_view",
    "leaner_casts",
    "leave_out_clamps",
    "packet_of",
    "pieces",
]

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


def _erase_unused(graph: fx.Graph, node: Any) -> None:
    while isinstance(node, fx.Node) and node.op == "call_function" and not node.users:
        above = node.args[0]
        graph.erase_node(node)
        node = above


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


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


def _passes_on(node: fx.Node) -> bool:
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
        elif _is_elementwise(node) or _passes_on(node):
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


_CHANNELS_LAST = 4  # dimensions, from which on a tensor may be in that order
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)


def copy_together(gradients: Sequence[Tensor], out: Tensor, group_size: int) -> None:
    """Copy ``gradients`` into ``out`` as a reduce-scatter reads them: rank after rank, of each gradient a part.

    Args:
        gradients: Each with a first dimension that ``group_size`` divides.
        out: As many elements as all of them, in one dimension.
        group_size: How many ranks.
    """
    sizes = [gradient.numel() // group_size for gradient in gradients]
    for part, gradient, size in zip(out.view(group_size, -1).split(sizes, dim=1), gradients, sizes, strict=True):
        part.copy_(gradient.reshape(group_size, size))


@torch.library.custom_op("lightning_ups::reduce_scatter_input", mutates_args=())
def _reduce_scatter_input(gradients: list[Tensor], group_size: int, dtype: torch.dtype) -> Tensor:
    together = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=dtype)
    copy_together(gradients, together, group_size)
    return together


@_reduce_scatter_input.register_fake
def _(gradients: list[Tensor], group_size: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001  (the signature)
    return gradients[0].new_empty((sum(gradient.numel() for gradient in gradients),), dtype=dtype)


def cast_where_copied(graph: fx.Graph) -> None:
    """Let matrix products be cast while they are copied together, as FSDP2 does, and not before.

    A cast by itself reads and writes them once more, and its result is as large again. Of what else there is inductor
    casts within the kernel that computes it, without rounding in between. Gradients of convolutions are copied so, too:
    their memory may be in another order, of which torch 2.11 fails to take a view.
    """
    bucketing = getattr(torch.ops, "bucketing", None)
    target = getattr(getattr(bucketing, "_pre_bucket_reduce_scatter", None), "default", None)
    for node in graph.find_nodes(op="call_function", target=target) if target is not None else ():
        gradients, group_size = node.args
        sources = [_uncast(gradient) for gradient in gradients]
        if sources == [*gradients] and all(_value(gradient).dim() < _CHANNELS_LAST for gradient in gradients):
            continue
        with graph.inserting_before(node):
            dtype = node.meta["val"].dtype
            together = graph.call_function(
                torch.ops.lightning_ups.reduce_scatter_input.default, (sources, group_size, dtype)
            )
        # All but what inductor remembers of the arguments, which are others now.
        together.meta.update({key: value for key, value in node.meta.items() if key != "eager_input_vals"})
        node.replace_all_uses_with(together)
        graph.erase_node(node)
        for cast in dict.fromkeys(gradients):
            if not cast.users and is_cast(cast):
                graph.erase_node(cast)


def _uncast(gradient: Any) -> Any:
    """Return the product that ``gradient`` was before a cast that nothing else needs."""
    source = gradient.args[0] if gradient.args else None
    if not is_cast(gradient) or len(gradient.users) != 1 or not isinstance(source, fx.Node):
        return gradient
    if not _is_product(source):
        return gradient
    before, after = source.meta["val"], gradient.meta["val"]
    return source if before.device == after.device and before.is_contiguous() and after.is_contiguous() else gradient


def _is_product(node: fx.Node) -> bool:
    source = above(node, is_view)
    return isinstance(source, fx.Node) and packet_of(source) in _PRODUCTS
