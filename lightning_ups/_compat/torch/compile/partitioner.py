"""Fixes of AOTAutograd's partitioner, which splits a graph into forward and backward."""

import inspect
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_ups._compat.patches import applied

_NOTHING = 1e-9  # anything less keeps nothing
_NOT_BY_COST = (
    "eager",
    "eager_noexcept",
    "eager_debug",
    "aot_eager_default_partitioner",
    "cudagraphs",
    "openxla",
    "tvm",
)


def heeds_memory_budget(backend: str) -> bool:
    """Return whether ``backend`` splits graphs by cost and so respects a memory budget; unknown ones are assumed to."""
    return backend not in _NOT_BY_COST


def gradients_apart() -> AbstractContextManager[None]:
    """Give each gradient its own memory, and each collective one wait, if equal gradients are reduced once.

    The partitioner merges equal nodes except outputs. A reduction is merged, but the wait, an output, returns the
    memory of the reduction: two parameters would share one gradient, which would be accumulated or clipped for each of
    them. Inductor's passes, in turn, expect one wait for each collective.
    """

    def waiting_once(original: Callable[..., fx.Graph]) -> Callable[..., fx.Graph]:
        def fx_graph_cse(*args: Any, **kwargs: Any) -> fx.Graph:
            merged = original(*args, **kwargs)
            _wait_once(merged)
            return merged

        return fx_graph_cse

    return applied("torch._functorch.partitioners:fx_graph_cse", waiting_once, once=True)


def _wait_once(graph: fx.Graph) -> None:
    """Let each wait except the first for a collective copy the result of the first."""
    first: dict[Any, fx.Node] = {}
    for wait in graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
        if (waited := first.setdefault(wait.args[0], wait)) is not wait:
            wait.target = torch.ops.aten.clone.default
            wait.args = (waited,)


def random_states_in_place() -> AbstractContextManager[None]:
    """Let backward recompute random operations also in graphs that pass more than tensors and numbers to it.

    From torch 2.13 on, a graph with sharded parameters passes their mesh to its backward, after all tensors and before
    numbers. The partitioner inserts the random states before the numbers, ignoring the mesh, and the runtime treats the
    mesh as a tensor. Attention counts as random on a CPU, even without dropout.
    """
    from torch._functorch import partitioners  # slow to import, and not needed for --help

    is_opaque = getattr(partitioners, "is_opaque_node", None)
    if is_opaque is None:
        return nullcontext()

    def in_place(original: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(original)

        def functionalize_rng_ops(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            call = parameters.bind(*args, **kwargs)
            placeholders = call.arguments["bw_module"].graph.find_nodes(op="placeholder")
            opaque = [p for p in placeholders if "tangent" not in p.name and is_opaque(p)]
            call.arguments["num_sym_nodes"] += len(opaque)
            forward, backward = original(*call.args, **call.kwargs)
            for state in backward.graph.find_nodes(op="placeholder") if opaque else ():
                if state.name.startswith("rng_state_output"):
                    opaque[0].prepend(state)
            backward.recompile()
            return forward, backward

        return functionalize_rng_ops

    return applied("torch._functorch.partitioners:functionalize_rng_ops", in_place, once=True)


def random_numbers_kept() -> AbstractContextManager[None]:
    """Keep random numbers, such as a dropout's mask, when a memory budget recomputes them in backward.

    By default the partitioner draws new ones: it keeps generator states only for nodes that the user has marked for
    recomputation. Inductor draws seeds, and derives numbers from these, so only the seeds are kept. Contexts may be
    closed in any order. A graph with a separately compiled region that draws random numbers raises a RuntimeError
    during compilation.
    """
    return applied("torch._functorch.partitioners:choose_saved_values_set", _keeping_random_numbers, once=True)


def _keeping_random_numbers(original: Callable[..., list[fx.Node]]) -> Callable[..., list[fx.Node]]:
    parameters = inspect.signature(original)

    @wraps(original)
    def choose_saved_values_set(graph: fx.Graph, *args: Any, **kwargs: Any) -> list[fx.Node]:
        call = parameters.bind(graph, *args, **kwargs)
        call.apply_defaults()
        node_info, memory_budget = call.arguments["node_info"], call.arguments["memory_budget"]
        random = [node for node in graph.nodes if node_info.is_required_fw(node) and _draws(node)]
        random = [node for node in random if "recompute" not in node.meta]  # the user's own marks
        for node in random:
            _refuse_region(node, memory_budget)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if memory_budget < _NOTHING:
            # Torch ignores marks then.
            return list(dict.fromkeys([*node_info.inputs, *(leaf for node in random for leaf in _leaves(node))]))
        saved = original(*call.args, **call.kwargs)
        # A cut goes through the parts of a multi-output node; torch reports the node itself if it has no choice.
        return list(dict.fromkeys(part for node in saved for part in (_leaves(node) if node in random else [node])))

    return choose_saved_values_set


def _draws(node: fx.Node) -> bool:
    """Return whether ``node`` draws random numbers, so that it gives others when it runs again."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        owner = node.graph.owning_module
        names = [str(part.target) for part in node.all_input_nodes if part.op == "get_attr"]
        inner = [getattr(owner, name, None) for name in names]
        return any(_draws(each) for part in inner if isinstance(part, fx.GraphModule) for each in part.graph.nodes)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention has the tag even without dropout.
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    rate = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(rate != 0.0)


def _refuse_region(node: fx.Node, budget: float) -> None:
    """Raise if ``node`` is a region, for which inductor's backward draws other numbers even if the seeds are kept."""
    if budget < 1 and isinstance(node.target, torch._ops.HigherOrderOperator):
        raise RuntimeError(
            f"Under a memory budget, {node.target.name()} draws random numbers, and backward would draw others, because"
            " nested_compile_region compiles it by itself. Remove the dropout or the region, or use"
            " ActivationCheckpoint(save=...) instead of memory_budget."
        )


def _leaves(node: fx.Node) -> list[fx.Node]:
    """Return ``node``, or the items taken out of it if it is a tuple."""
    if not isinstance(node.meta.get("val"), tuple | list):
        return [node]
    return [leaf for part in node.users if part.target is operator.getitem for leaf in _leaves(part)]
