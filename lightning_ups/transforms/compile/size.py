"""Which captured graphs are too small for compilation to make them faster."""

from collections.abc import Iterator
from math import prod

from torch import Tensor, fx

__all__ = ["is_small"]

# Calling compiled code costs the host some hundred microseconds for guards, the forward and the backward, and replaying
# a CUDA graph no less: about what launching so many operators costs. Above so many elements, which a GPU reads and
# writes in some tens of microseconds, fusing them may gain more than that.
MOST_CALLS, MOST_ELEMENTS = 32, 2**22


def is_small(graph: fx.GraphModule) -> bool:
    """Return whether running the operators of ``graph`` one by one costs no more than calling compiled code."""
    calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    if len(calls) > MOST_CALLS or any(isinstance(part, fx.GraphModule) for part in graph.children()):
        return False  # a part that is a graph too is one of a checkpoint, say, or of attention that needs a compiler
    return sum(elements for node in calls for elements in _elements(node.meta.get("example_value"))) <= MOST_ELEMENTS


def _elements(value: object) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield prod(size if isinstance(size, int) else MOST_ELEMENTS for size in value.shape)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _elements(item)
