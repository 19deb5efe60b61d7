"""What a reduction of many gradients at once reads: all of them in one tensor, in the type of the reduction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ups._compat.torch.compile.graph_nodes import above, is_cast, is_view, packet_of

__all__ = ["cast_where_copied", "copy_together"]

_aten = torch.ops.aten
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
    casts within the kernel that computes it, without rounding in between.
    """
    bucketing = getattr(torch.ops, "bucketing", None)
    target = getattr(getattr(bucketing, "_pre_bucket_reduce_scatter", None), "default", None)
    for node in graph.find_nodes(op="call_function", target=target) if target is not None else ():
        gradients, group_size = node.args
        sources = [_uncast(gradient) for gradient in gradients]
        if sources == [*gradients]:
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
