"""Inductor's passes that bucket the collectives of a block, and overlap them with another block's compute.

A pass set by the user runs first.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from lightning_ups._compat.contexts import setting
from lightning_ups._compat.optional.packages import has
from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.compile import graph_passes, partitioner
from lightning_ups._compat.torch.compile.graph_passes import cast_where_copied
from lightning_ups._compat.torch.compile.inductor import known_by, passes_in
from lightning_ups._compat.torch.fsdp.gathers import group_of

_KINDS = {
    "all_gather_into_tensor": "gathers",
    "all_gather_into_tensor_out": "gathers",
    "reduce_scatter_tensor": "reduce-scatters",
    "reduce_scatter_tensor_out": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_reduce_": "all-reduces",
}
_COPIED_AT_ONCE = 2**26  # bytes: enough for the full rate of a link, and few enough to begin early


@dataclass(frozen=True)
class GraphCollectives:
    """The number of collectives in a graph, as traced and after the passes.

    Args:
        backward: Whether it is a backward graph.
        before: Collectives by kind, as traced.
        after: The same after the passes.
        groups: The number of blocks, and rests of roots, that gather in it.
    """

    backward: bool
    before: dict[str, int]
    after: dict[str, int]
    groups: int


@contextmanager
def bucketing(*, together: bool, key: str, told: Callable[[GraphCollectives], None]) -> Iterator[None]:
    """Let inductor bucket the collectives of each group while the context is open.

    Args:
        together: Whether to bucket, or only to count.
        key: Distinguishes graphs in inductor's caches, which do not see marks on nodes.
        told: Called for each compiled graph, but not for cached ones.
    """
    passes = _Bucket(together, key, told, passes_in(inductor_config.post_grad_custom_post_pass))
    with ExitStack() as stack:
        stack.enter_context(setting(inductor_config, "post_grad_custom_post_pass", passes))
        if together:  # the scheduler would undo the order of the pass
            stack.enter_context(setting(inductor_config, "reorder_for_peak_memory", value=False))
        yield


def collectives_of(graph: fx.Graph) -> dict[str, int]:
    """Return the number of collectives of each kind in ``graph``."""
    names = (_name(node) for node in graph.nodes)
    return dict(Counter(_KINDS[name] for name in names if name in _KINDS))


def _name(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function" or getattr(target, "namespace", "") != "_c10d_functional":
        return ""
    return target._schema.name.partition("::")[2]  # type: ignore[union-attr]


@dataclass
class _Bucket(CustomGraphPass):
    together: bool
    key: str
    told: Callable[[GraphCollectives], None]
    others: list[Any] = field(default_factory=list)

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.others:
            other(graph)
        before = collectives_of(graph)
        if not before:
            return
        _reduce_sums(graph)
        groups = list(dict.fromkeys(group for node in graph.nodes if (group := _place(node)) is not None))
        backward = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
        if self.together:
            with _telling_how_to_leave_out():
                _put_together(graph, groups)
                if backward:
                    _reduce_copies(graph)
        self.told(GraphCollectives(backward, before, collectives_of(graph), len(groups)))

    def uuid(self) -> Any:
        if (others := known_by(self.others)) is None:
            return None  # no caching, as without our pass
        code = get_hash_for_files((__file__, graph_passes.__file__, partitioner.__file__))
        return code, self.together, self.key, others


def _put_together(graph: fx.Graph, groups: list[str]) -> None:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    numbers = {group: f"group{i}" for i, group in enumerate(groups)}  # names without dots, which would be levels

    def stack(node: fx.Node) -> list[tuple[str, type[nn.Module]]]:
        group = _place(node)
        return [] if group is None else [(numbers[group], nn.Module)]

    if groups and (module := graph.owning_module) is not None:
        with _without_estimates(), _gathering_types_together():
            manual_overlap_bucketing(module, [*numbers.values()], insert_overlap_deps=True, module_stack_fn=stack)
        cast_where_copied(graph)


@contextmanager
def _telling_how_to_leave_out() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            "inductor's pass that puts collectives together, which overlap='none' leaves out, failed:"
            f" {type(error).__name__}: {error}"
        ) from error


def _reduce_sums(graph: fx.Graph) -> None:
    """Reduce the sum of two gradients of a tied parameter, instead of each."""
    sums = list(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))
    for node in sums:  # to which the loop adds: reductions over replicas come second
        waits = [arg for arg in node.args if isinstance(arg, fx.Node) and len(arg.users) == 1]
        reductions = [wait.args[0] for wait in waits if _name(wait) == "wait_tensor"]
        first, second = reductions if len(reductions) == 2 and not node.kwargs else (None, None)
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node) and first is not second):
            continue
        alone = len(first.users) == 1 and len(second.users) == 1
        reduces = _name(first) == _name(second) in ("reduce_scatter_tensor", "all_reduce")
        gradients = (first.args[0], second.args[0])
        if alone and reduces and first.args[1:] == second.args[1:] and all(isinstance(g, fx.Node) for g in gradients):
            sums.append(_reduce_sum(graph, node, waits, first, second))


def _reduce_sum(graph: fx.Graph, node: fx.Node, waits: list[fx.Node], first: fx.Node, second: fx.Node) -> fx.Node:
    with graph.inserting_before(node):
        total = graph.call_function(torch.ops.aten.add.Tensor, (first.args[0], second.args[0]))
        reduced = graph.call_function(second.target, (total, *second.args[1:]))  # type: ignore[arg-type]
        waited = graph.call_function(waits[1].target, (reduced,))  # type: ignore[arg-type]
    for made, like in ((total, second.args[0]), (reduced, second), (waited, waits[1])):
        assert isinstance(like, fx.Node)
        made.meta.update(like.meta)
    node.replace_all_uses_with(waited)
    for gone in (node, *waits, first, second):
        graph.erase_node(gone)
    return total


def _reduce_copies(graph: fx.Graph) -> None:
    """Bucket all-reduces of gradients, and wait for them at the end, since only the outputs need their results."""
    from torch._inductor.fx_passes.bucketing import merge_all_reduce_bucket

    for nodes in _reductions_of_copies(graph):
        made = merge_all_reduce_bucket(graph, nodes)[0] if len(nodes) > 1 else nodes
        for node in [node for node in made if _name(node) == "all_reduce"]:
            *results, output = _after(node)
            for result in results:
                output.prepend(result)


def _reductions_of_copies(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return all-reduces whose results are only returned: by group; those without a group, by size."""
    found: dict[Any, list[fx.Node]] = {}
    filled = 0
    for node in graph.nodes:
        if _name(node) != "all_reduce" or not (after := _after(node)) or after[-1].op != "output":
            continue
        value, place = node.meta["val"], _place(node)
        if place is None:
            filled += value.numel() * value.element_size()
            place = filled // _COPIED_AT_ONCE
        found.setdefault((place, *node.args[1:], value.dtype), []).append(node)
    return [*found.values()]


def _after(node: fx.Node) -> list[fx.Node]:
    """Return what is computed from ``node``, in order and ending with the output, if it has no other inputs."""
    found: dict[fx.Node, None] = {}
    queue = [*node.users]
    while queue:
        other = queue.pop(0)
        if other.op != "output" and len(other.all_input_nodes) != 1:
            return []
        found[other] = None
        queue += other.users
    return sorted(found, key=lambda other: other.op == "output")


@contextmanager
def _without_estimates() -> Iterator[None]:
    # Since torch 2.13 the pass asks triton for the bandwidth of the device, which it does not need here.
    estimation = importlib.import_module("torch.utils._runtime_estimation")
    if (has("triton") and torch.cuda.is_available()) or not hasattr(estimation, "get_gpu_dram_gbps"):
        yield
        return
    with applied("torch.utils._runtime_estimation:get_gpu_dram_gbps", lambda _: lambda: 1, once=True):
        yield


_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def _gathering_types_together() -> Iterator[None]:
    """Gather bfloat16 and float32 tensors together for autocast; torch's pass supports it, but never does it."""
    module = "torch._inductor.fx_passes.overlap_manual_scheduling"
    name = "bucket_key" if hasattr(importlib.import_module(module), "bucket_key") else "get_full_bucket_key"
    with applied(f"{module}:{name}", _of_any_type, once=True):
        yield


def _of_any_type(key_of: Callable[..., Any]) -> Callable[..., Any]:
    def key(node: fx.Node, *mode: Any, **options: Any) -> Any:
        if _may_be_any_type(node):
            return key_of(node, "custom_ops_multidtype")
        return key_of(node, *mode, **options)

    return key


def _may_be_any_type(node: fx.Node) -> bool:
    shard = node.args[0]
    if _KINDS.get(_name(node)) != "gathers" or not isinstance(shard, fx.Node):
        return False
    value = shard.meta["val"]
    return value.dtype in _TOGETHER and value.numel() * value.dtype.itemsize % 4 == 0  # the next one must be aligned


def _place(node: fx.Node) -> str | None:
    return group_of(node) if _name(node) and not _gathers_complex(node) else None


def _gathers_complex(node: fx.Node) -> bool:
    # The pass gathers into memory that it allocates, which is the one case in which torch does not convert complex
    # numbers.
    return _KINDS.get(_name(node)) == "gathers" and node.meta["val"].is_complex()
