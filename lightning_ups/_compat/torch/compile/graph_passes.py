"""Passes over the graphs that inductor compiles: float8 casts, maxima, and the input of a reduction.

None of them changes a bit of the results. A float8 cast follows a maximum of its input, by which it is scaled, so
torchao's clamps have no effect. The maximum of concatenated tensors is the maximum over the parts. If inductor itself
writes a matrix, the same kernel can compute the maximum of each piece. And a cast can be done while gradients are
copied together for their reduction.
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

_aten = torch.ops.aten
_VIEWS = (_aten.t, _aten.transpose, _aten.permute, _aten.view, _aten._unsafe_view, _aten.reshape)
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)


def above(node: Any, goes_on: Callable[[fx.Node], bool]) -> Any:
    """Follow first arguments from ``node`` upwards while ``goes_on`` returns True, and return the last one."""
    while isinstance(node, fx.Node) and goes_on(node):
        node = node.args[0]
    return node


def is_cast(node: fx.Node) -> bool:
    """Return whether ``node`` casts its first argument."""
    return node.target in _CASTS


def is_view(node: fx.Node) -> bool:
    """Return whether ``node`` is a view of its first argument."""
    return packet_of(node) in _VIEWS


def packet_of(node: fx.Node) -> Any:
    """Return the operator of ``node`` without its overload, or None."""
    return getattr(node.target, "overloadpacket", None)


_LEAST = 1e-12  # of a maximum, as in torchao: it is a divisor
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@contextmanager
def leaner_casts() -> Iterator[None]:
    """Compile cheaper casts to float8 while the context is open."""
    with even_splits(), graph_pass("joint", leave_out_clamps), graph_pass("apart", find_maxima_apart):
        yield


def leave_out_clamps(graph: fx.Graph) -> None:
    """Remove clamps before casts to float8 of values that were scaled by their own maximum to the float8 maximum.

    The scaled maximum equals the float8 maximum except for the rounding of the scale, at most 2**-8, and float8 rounds
    values up to 2**-5 above to its maximum. NaN stays NaN with and without clamps.
    """
    for cast in [node for node in graph.nodes if is_cast(node) and _dtype(node) in _FLOAT8]:
        clamped, largest = cast.args[0], torch.finfo(_dtype(cast)).max
        scaled = _argument(_argument(clamped, _aten.clamp_max.default, largest), _aten.clamp_min.default, -largest)
        if isinstance(scaled, fx.Node) and _is_scaled_by_its_maximum(scaled, largest):
            cast.replace_input_with(clamped, scaled)
            _erase_unused(graph, clamped)


def _argument(node: Any, target: Any, *rest: Any) -> Any:
    """Return the first argument of ``node`` if it is this ``target`` with this ``rest`` of arguments, else None."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is target and node.args[1:] == rest else None


def _is_scaled_by_its_maximum(scaled: fx.Node, largest: float) -> bool:
    if scaled.target is not _aten.mul.Tensor:
        return False
    return any(
        (maximum := _maximum_of(scale, largest)) is not None and maximum is above(value, _keeps_values)
        for value, scale in (scaled.args, reversed(scaled.args))
    )


def _maximum_of(scale: Any, largest: float) -> fx.Node | None:
    """Return the values whose maximum ``scale`` maps to ``largest``, or None."""
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
    """Return whether it casts to float32 or float64, whose rounding of a scale is small enough to drop clamps."""
    return is_cast(node) and _dtype(node) in (torch.float32, torch.float64)


def _keeps_values(node: fx.Node) -> bool:
    """Return whether it has the values of its argument, in another shape or, without loss, in another dtype."""
    return _only_shows(node) or _widens(node)


def _only_shows(node: fx.Node) -> bool:
    return is_view(node) or packet_of(node) is _aten.unsqueeze


def _widens(node: fx.Node) -> bool:
    source = node.args[0] if is_cast(node) else None
    return isinstance(source, fx.Node) and torch.promote_types(_dtype(source), _dtype(node)) == _dtype(node)


def find_maxima_apart(graph: fx.Graph) -> None:
    """Compute the maximum of concatenated values from the parts, each of which is read in its memory order."""
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
    """Return whether it is known to be non-empty: an empty tensor has no maximum."""
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
LONGEST = 1024  # the most that inductor reduces at once, without a loop: 32 two-byte values for each thread of a warp
SHORTEST = 128  # with shorter pieces, the maxima are a significant part of what is written
FEWEST = 1024  # programs, one per piece: fewer do not fill a GPU, and inductor would split them


def find_where_written(graph: fx.Graph, maxima: OpOverload) -> None:
    """Let calls of ``maxima`` read the maxima of pieces, if the kernel that writes the matrix can compute these."""
    for node in graph.find_nodes(op="call_function", target=maxima):
        values = node.args[0]
        shape = pieces(values)
        if shape is None:
            continue
        with graph.inserting_before(node):
            # Use the tensor that the launch of a cast reads, not a view of it: inductor keeps that one in memory, and
            # would compute the other a second time.
            shown = _new(graph, _aten.view.default, values, [*shape])
            largest = _new(graph, _aten.amax.default, _new(graph, _aten.abs.default, shown), [-1])
            found = _new(graph, maxima, largest)  # a new node: a call of an operator stores the strides of its inputs
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def pieces(values: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of ``values`` split into pieces along the last dimension, or None if that needs another read.

    Inductor fuses equal loops: if ``values`` are computed from reductions of rows, as in a norm, a piece is a row.
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
        outer = rows if rows[-1] == width else shape  # as many loops, otherwise inductor does not see that they match
        found = (*outer[:-1], width // length, length)
    elif reduced <= {width} and rows[-1] == width:
        found = rows
    else:
        return None
    return found if math.prod(found[:-1]) >= FEWEST else None


def _keeps_order(node: fx.Node) -> bool:
    return is_view(node) and packet_of(node) not in (_aten.t, _aten.transpose, _aten.permute)


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether inductor computes it elementwise."""
    return is_cast(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _passes_on(node: fx.Node) -> bool:
    return is_view(node) or node.target is operator.getitem or packet_of(node) in _BROADCASTS


def _reduced_lengths(source: fx.Node) -> set[int]:
    """Return the lengths of reductions of tensors of the size of ``source`` from which it is computed."""
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
    """Return the number of elements, or 0 if unknown."""
    shape = _value(node).shape
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else 0


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return value if isinstance(value, Tensor) else value[0]


_CHANNELS_LAST = 4  # the minimum number of dimensions of a channels-last tensor
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)


def copy_together(gradients: Sequence[Tensor], out: Tensor, group_size: int) -> None:
    """Copy ``gradients`` into ``out`` in the order of a reduce-scatter: for each rank, a part of each gradient.

    Args:
        gradients: Gradients whose first dimension is divisible by ``group_size``.
        out: A 1-D tensor with as many elements as all of them.
        group_size: The number of ranks.
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
    """Cast matrix products while they are copied together, as FSDP2 does, and not before.

    A separate cast reads and writes them once more, and its result needs as much memory again. Other values are cast by
    inductor within the kernel that computes them, without rounding in between. Gradients of convolutions are copied in
    this way, too: their memory may be in another order, of which torch 2.11 fails to create a view.
    """
    from torch._inductor.fx_passes import bucketing  # noqa: F401  (defines the operator)

    for node in graph.find_nodes(op="call_function", target=torch.ops.bucketing._pre_bucket_reduce_scatter.default):
        gradients, group_size = node.args
        sources = [_uncast(gradient) for gradient in gradients]
        if sources == [*gradients] and all(_value(gradient).dim() < _CHANNELS_LAST for gradient in gradients):
            continue
        with graph.inserting_before(node):
            dtype = node.meta["val"].dtype
            together = graph.call_function(
                torch.ops.lightning_ups.reduce_scatter_input.default, (sources, group_size, dtype)
            )
        # Everything except inductor's notes about the arguments, which have changed.
        together.meta.update({key: value for key, value in node.meta.items() if key != "eager_input_vals"})
        node.replace_all_uses_with(together)
        graph.erase_node(node)
        for cast in dict.fromkeys(gradients):
            if not cast.users and is_cast(cast):
                graph.erase_node(cast)


def _uncast(gradient: Any) -> Any:
    """Return the product before a cast to ``gradient``, if nothing else uses the cast."""
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
