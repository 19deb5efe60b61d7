"""Finds gathers of parameters in the graphs that Dynamo captures, and marks them for AOTAutograd.

Dynamo records a read of a sharded parameter as two calls, ``redistribute`` and ``to_local``, each with its module
stack. They are methods in torch 2.13, and generated functions, ``prim_...``, in 2.11. Marks on these nodes are copied
to the forward and the backward graph.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_LAST = 2**31  # above the number of any checkpointed region, whose own gathers are recomputed within it
_GROUP = "lightning_ups_group"


def gathers(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two nodes of each gather in ``graph``, in execution order.

    Gathers in checkpointed regions are included, at the position of the region.
    """
    for node in _in_order(graph, set()):
        source = node.args[0] if node.args else None
        if _calls(node, "to_local") and isinstance(source, fx.Node) and _calls(source, "redistribute"):
            yield source, node


def _in_order(graph: fx.GraphModule, seen: set[fx.GraphModule]) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        inner = graph.get_submodule(node.target) if _names_module(graph, node) else None
        if isinstance(inner, fx.GraphModule) and inner not in seen:
            seen.add(inner)
            yield from _in_order(inner, seen)
        yield node


def _names_module(graph: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(graph, str(node.target), None), fx.GraphModule)


def _calls(node: fx.Node, method: str) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in (method, f"prim_{method}")


def recompute(node: fx.Node) -> None:
    """Let the backward recompute ``node``, and keep nothing of it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _LAST


def module_path(node: fx.Node) -> list[str]:
    """Return the names of the modules that created ``node``, outermost first, below the compiled one."""
    stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
    return [path.removeprefix("L['self']").removeprefix(".") for path in stack]


def set_group(node: fx.Node, group: str) -> None:
    """Mark ``node``, and its copies in forward and backward graphs, as part of ``group``."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _GROUP: group}


def group_of(node: fx.Node) -> str | None:
    """Return the group that `set_group` gave to the origin of ``node``."""
    return node.meta.get("custom", {}).get(_GROUP)


def written(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the graph writes to the result of ``node``, or to a view of it."""
    memory = _memory(node)
    if memory is None:
        return False
    owner = node.graph.owning_module or graph
    return any(_memory(other) == memory and _value(other)._version > 0 for other in owner.graph.nodes)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _memory(node: fx.Node) -> int | None:
    value = _value(node)
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor) or not hasattr(value, "untyped_storage"):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper without its own memory
        return None
