"""Rehearsing compiled code: the graphs that the compiler would make, run so that only what it would store exists."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

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

__all__ = ["Program", "as_compiled"]

_NEVER = 2**62
_Owners = list[list[str | None]]  # of the arguments of each forward whose backward is still to come


class Program:
    """A graph in the compiler's operators, run with the memory that compiled code would take.

    Pointwise operators and reductions are loops that the compiler fuses. A result of one is stored only where the
    graph returns it or an operator that is no loop reads it; of what a stored result needs, what is needed no more
    gives its memory to it. Results of other operators are stored. Everything is freed after its last reader.

    Args:
        graph: What is run.
        ledger: What is entered in it: what is stored, and nothing else.
        owners: Shared by the graphs of a forward and its backward. The backward then claims the gradient of a parameter
            when it is made, as what the same graph reduces, and not when all of it has run.
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
        """Run on ``args``, which are taken out of the list."""
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
        """Return the gradients of parameters among the results, and whose they are."""
        if self._owners is None:
            return {}
        if not self._is_backward:
            self._owners.append(
                [self._ledger.owner_of(arg, "parameters") if isinstance(arg, Tensor) else None for arg in args]
            )
            return {}
        results = self._nodes[-1].args[0]
        assert isinstance(results, Sequence)
        # A backward gives a gradient, or nothing, for each argument of its forward.
        pairs = zip(results, self._owners.pop(), strict=False)
        return {result: owner for result, owner in pairs if isinstance(result, fx.Node) and owner is not None}

    def _value(self, node: fx.Node, env: dict[fx.Node, Any], *, dying: Iterable[fx.Node]) -> Any:
        if node in self.stored and not is_fused(node.target):
            return self._run.run_node(node)
        with self._ledger.paused():
            value = self._run.run_node(node)
        if node in self.stored:
            for dead in dying:  # its memory is written over, or free by the time the loop has ended
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
    """Return what was computed to get ``node``, which may be a view of it."""
    while node.op == "call_function" and (is_view(node.target) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _last_reads(nodes: Sequence[fx.Node], index: dict[fx.Node, int], stored: set[fx.Node]) -> dict[fx.Node, int]:
    # What is not stored is computed where it is read: then its own sources are read.
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
    """Run ``modules``, while the context is open, as if each were compiled for itself.

    What an eager forward between two graphs of a module does is seen as it is. Modules that are recomputed shall be so
    already: the compiler then splits their graphs accordingly.

    Args:
        modules: What is compiled.
        ledger: What counts.
        reduces: Whether the graphs reduce gradients, each as soon as it is made.
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
        for module in dict.fromkeys(modules):
            undo.enter_context(replaced_forward(module, compiled))
        try:
            yield
        finally:
            forget_compiled()


def _own(inner: Forward) -> Forward:
    # Dynamo skips functions of torch's own files, and with them all that they call.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return forward
