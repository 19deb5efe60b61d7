"""Lets compiled graphs launch the Triton kernels of custom operators themselves.

An operator is opaque to inductor: its code calls torch's dispatcher, that calls Python, and that calls Triton, which
takes 30 to 60 microseconds. A direct launch takes as long as for inductor's own kernels.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from lightning_ups._compat.optional.packages import launching_on
from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.compile.inductor import graph_pass


class Launch(NamedTuple):
    """A Triton kernel to launch, with four warps.

    Args:
        kernel: The Triton kernel.
        programs: The number of programs.
        arguments: Arguments by name; tensors are contiguous.
        written: Names of the arguments that the kernel writes to.
    """

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    written: tuple[str, ...]

    def run(self, device: torch.device) -> None:
        """Launch the kernel."""
        with launching_on(device):
            self.kernel[(self.programs,)](**self.arguments)


class Operator(NamedTuple):
    """An operator whose outputs are all written by one launch.

    Args:
        operator: The operator in graphs.
        launch: Returns the launch for the operator's inputs and outputs, which are fake tensors, or None if the
            operator does more than one launch.
    """

    operator: OpOverload
    launch: Callable[[Sequence[Any], Sequence[Tensor]], Launch | None]


@contextmanager
def launched_by_graphs(operators: Sequence[Operator], *, sources: Sequence[str]) -> Iterator[None]:
    """Let graphs that are compiled while the context is open launch the kernels of ``operators`` themselves.

    Calls with dynamic shapes are not replaced.

    Args:
        operators: The operators whose calls are replaced.
        sources: Files that a launch depends on: inductor's caches identify a graph by their content.
    """

    def change(graph: fx.Graph) -> None:
        for each in operators:
            launch_directly(graph, each)

    with graph_pass("apart", change, sources=sources), _analysed_once():
        yield


@contextmanager
def _analysed_once() -> Iterator[None]:
    """Let torch analyze only once, for each kind of launch, what its kernel writes to, while the context is open.

    For that, Triton parses the kernel in 10 ms, twice for each launch: 672 times for eight blocks with casts by rows.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    # The first also finds what is read.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    name = next((name for name in names if hasattr(triton_kernel_wrap, name)), names[0])
    with applied(f"torch._higher_order_ops.triton_kernel_wrap:{name}", _remembering, once=True):
        yield


def _remembering(analyse: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[Any, Any] = {}

    def analysed(kernel: Any, arguments: dict[str, Any], *rest: Any, **options: Any) -> Any:
        kinds = {name: _kind(value) for name, value in arguments.items()}
        if any(rest) or any(options.values()) or None in kinds.values():  # descriptors, or unknown kinds
            return analyse(kernel, arguments, *rest, **options)
        key = kernel, *kinds.items()
        if key not in found:
            found[key] = analyse(kernel, arguments, *rest, **options)
        return found[key]

    return analysed


def _kind(value: Any) -> Any:
    """Return everything that Triton uses of an argument while it parses a kernel, or None if unknown."""
    if isinstance(value, int | float | str):
        return type(value), value
    dtype = getattr(value, "dtype", None)  # of a fake tensor, or of inductor's placeholder
    return dtype if isinstance(dtype, torch.dtype) else None


def launch_directly(graph: fx.Graph, known: Operator) -> None:
    """Replace each call of an operator by its launch."""
    for node in graph.find_nodes(op="call_function", target=known.operator):
        inputs = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
        value = node.meta["val"]
        outputs = [value] if isinstance(value, Tensor) else [*value]
        if not all(map(_can_be_launched_on, (each for each in (*inputs, *outputs) if isinstance(each, Tensor)))):
            continue
        launch = known.launch(inputs, outputs)
        if launch is not None:
            with graph.inserting_before(node):
                found = _launched(graph, launch, [*zip(inputs, node.args, strict=True)], outputs)
            _replace(graph, node, found)


def _can_be_launched_on(tensor: Tensor) -> bool:
    is_known = all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
    return is_known and tensor.device.type == "cuda" and tensor.is_contiguous() and tensor.numel() > 0


def _launched(
    graph: fx.Graph, launch: Launch, inputs: Sequence[tuple[Any, Any]], outputs: Sequence[Tensor]
) -> list[fx.Node]:
    """Add a launch to ``graph``, and return the nodes of its outputs."""
    # Inductor detects by itself that the kernel may write to new memory in place.
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
    from torch._inductor.lowering import needs_realized_inputs

    # As for any operator: an input shared by two launches is then written to memory once, and not for each.
    realized: Any = needs_realized_inputs
    realized.add(torch.ops.higher_order.triton_kernel_wrapper_mutation)
    nodes = {id(value): node for value, node in inputs} | {id(each): _empty(graph, each) for each in outputs}
    tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in launch.arguments.items() if name not in tensors}
    call = graph.call_function(
        triton_kernel_wrapper_functional,
        kwargs={
            "kernel_idx": kernel_side_table.add_kernel(launch.kernel),
            "constant_args_idx": kernel_side_table.add_constant_args(others),
            "grid": [(launch.programs, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {name: nodes[id(value)] for name, value in tensors.items()},
            "tensors_to_clone": [*launch.written],
        },
    )
    call.meta["val"] = {name: _place_of(tensors[name]) for name in launch.written}
    names = {id(tensors[name]): name for name in launch.written}
    return [_shown(graph, call, names[id(each)], each) for each in outputs]


def _empty(graph: fx.Graph, value: Tensor) -> fx.Node:
    place = _place_of(value)
    settings = {"dtype": place.dtype, "device": place.device, "pin_memory": False}
    node = graph.call_function(torch.ops.aten.empty.memory_format, ([*place.shape],), settings)
    node.meta["val"] = place
    return node


def _place_of(value: Any) -> Tensor:
    """Return new memory for ``value``, with at least one dimension: inductor would fill a scalar with a kernel."""
    with value.fake_mode:
        return value.new_empty(value.shape or (1,))


def _shown(graph: fx.Graph, call: fx.Node, name: str, output: Tensor) -> fx.Node:
    node = graph.call_function(operator.getitem, (call, name))
    node.meta["val"] = call.meta["val"][name]
    if output.dim() > 0:
        return node
    scalar = graph.call_function(torch.ops.aten.view.default, (node, []))
    with output.fake_mode:  # type: ignore[attr-defined]
        scalar.meta["val"] = node.meta["val"].view(())
    return scalar


def _replace(graph: fx.Graph, node: fx.Node, found: Sequence[fx.Node]) -> None:
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(found[0])
    else:
        for item in [*node.users]:
            item.replace_all_uses_with(found[item.args[1]])  # type: ignore[index]  (what takes an output of several)
            graph.erase_node(item)
    graph.erase_node(node)
