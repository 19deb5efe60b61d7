"""Compiled code in a dry run: the graphs of the compiler run so that only tensors that it would store exist."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.compile.partitioner import random_states_in_place
from lightning_ups._compat.torch.fake_tensors import (
    forget_compiled,
    is_fused,
    is_view,
    partitioning_backend,
    quiet_compiler,
)
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.insight.memory.cuda import as_on_cpu
from lightning_ups.transforms.forward import Forward, replaced_forward

_NEVER = 2**62
_Owners = list[list[str | None]]  # of the arguments of each forward graph whose backward has not run


class Program:
    """A graph in inductor's operators, run with the memory of compiled code.

    Inductor fuses pointwise operators and reductions. Their results are stored only if the graph returns them or an
    operator that is not fused reads them, and they reuse the memory of inputs that are no longer needed. Results of
    other operators are stored. Each is freed after its last reader.

    Args:
        graph: The graph.
        ledger: Counts stored tensors only.
        owners: Shared by a forward graph and its backward. The backward then claims the gradient of a parameter as soon
            as it is computed, since the same graph reduces it.
    """

    def __init__(self, graph: fx.GraphModule, ledger: Ledger, *, owners: "_Owners | None" = None) -> None:
        self._run = fx.Interpreter(graph)
        self._ledger = ledger
        self._owners = owners
        self._nodes = [*graph.graph.nodes]
        self._is_backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in self._nodes)
        index = {node: i for i, node in enumerate(self._nodes)}
        self.stored = _stored(self._nodes)
        self._last = _last_reads(self._nodes, index, self.stored)
        self._drop: dict[int, list[fx.Node]] = {}
        for node in self._nodes:
            self._drop.setdefault(self._last[node], []).append(node)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on ``args``, and empty the list."""
        self._run.env = env = {}
        reduced = self._reduced(args)
        with self._ledger.resumed():
            for i, node in enumerate(self._nodes):
                if node.op == "placeholder":
                    env[node] = args.pop(0)
                elif node.op == "output":
                    self._run.env = {}
                    return map_arg(node.args[0], lambda n: env[n])
                else:
                    env[node] = self._value(node, env, dying=self._drop.get(i, ()))
                    if node in reduced:
                        self._ledger.claim([env[node]], "gradients", reduced[node])
                for dead in self._drop.get(i, ()):
                    env.pop(dead, None)
        raise AssertionError("a graph ends with its output")

    def _reduced(self, args: list[Any]) -> dict[fx.Node, str]:
        """Return the gradients of parameters among the results, with their owners."""
        if self._owners is None:
            return {}
        if not self._is_backward:
            self._owners.append(
                [self._ledger.owner_of(arg, "parameters") if isinstance(arg, Tensor) else None for arg in args]
            )
            return {}
        results = self._nodes[-1].args[0]
        assert isinstance(results, Sequence)
        # A backward returns a gradient or None for each argument of its forward.
        pairs = zip(results, self._owners.pop(), strict=False)
        return {result: owner for result, owner in pairs if isinstance(result, fx.Node) and owner is not None}

    def _value(self, node: fx.Node, env: dict[fx.Node, Any], *, dying: Iterable[fx.Node]) -> Any:
        if node in self.stored and not is_fused(node.target):
            return self._run.run_node(node)
        with self._ledger.paused():
            value = self._run.run_node(node)
        if node in self.stored:
            for dead in dying:  # its memory is reused, or free when the loop ends
                if dead is not node:
                    env.pop(dead, None)
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    self._ledger.enter(leaf)
        return value


def _stored(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    stored: set[fx.Node] = set()
    for node in nodes:
        if node.op == "output" or (node.op == "call_function" and _is_opaque(node)):
            stored.add(node)
            for source in node.all_input_nodes:
                stored.add(_origin(source))
    return stored


def _is_opaque(node: fx.Node) -> bool:
    return not (is_fused(node.target) or is_view(node.target) or _is_item(node))


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _origin(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` is a view of."""
    while node.op == "call_function" and (is_view(node.target) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _last_reads(nodes: Sequence[fx.Node], index: dict[fx.Node, int], stored: set[fx.Node]) -> dict[fx.Node, int]:
    # A result that is not stored is computed by its reader, which then reads its sources.
    last: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        reads = [index[node]]
        for user in node.users:
            if user.op == "output":
                reads.append(_NEVER)
            else:
                reads.append(index[user] if user in stored else last[user])
        last[node] = max(reads)
    return last


@contextmanager
def as_compiled(modules: Iterable[nn.Module], *, ledger: Ledger, reduces: bool = False) -> Iterator[None]:
    """Run each of ``modules`` as if it were compiled, while the context is open.

    Code between two graphs of a module runs eagerly. Recomputation must be set up before, so that the compiler
    partitions the graphs accordingly.

    Args:
        modules: The modules to compile.
        ledger: Counts the memory.
        reduces: Whether the graphs reduce each gradient as soon as it is computed.
    """
    forget_compiled()

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        shared: dict[str, Any] = {"owners": []} if reduces else {}
        return partitioning_backend(lambda part: Program(part, ledger, **shared))(graph, inputs)

    frames: dict[Forward, Callable[..., Any]] = {}

    def compiled(inner: Forward) -> Forward:
        if inner not in frames:
            frames[inner] = torch.compile(_own(inner), backend=backend, dynamic=False)
        run = frames[inner]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with as_on_cpu():
                return run(self, *args, **kwargs)

        return forward

    with ExitStack() as undo:
        undo.enter_context(quiet_compiler())
        undo.enter_context(random_states_in_place())
        for module in dict.fromkeys(modules):
            undo.enter_context(replaced_forward(module, compiled))
        try:
            yield
        finally:
            forget_compiled()


def _own(inner: Forward) -> Forward:
    # Dynamo skips functions in torch's own files, and all that they call.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return forward
