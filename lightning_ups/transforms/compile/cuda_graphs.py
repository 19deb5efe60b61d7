"""What a training loop owes to CUDA graphs, whose outputs lie in memory that the next step writes to again."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand, Recording
from lightning_ups._compat.torch.tensors.autograd import keeps_graph

COPIED_BYTES = 64 * 2**20  # of what a graph returns: a copy that takes a device some microseconds, and no more


def begin_step() -> None:
    """Say that a step begins, and that what graphs returned in the last one may be overwritten."""
    torch.compiler.cudagraph_mark_step_begin()


def copied(outputs: Any, *, limit: int = 0) -> Any:
    """Return ``outputs`` of a graph with copies of what is likely to be kept.

    These are scalars, all of an evaluation, and, in training, all if it is no more than ``limit`` bytes.
    """
    everything = not torch.is_grad_enabled() or (limit > 0 and size(outputs) <= limit)
    return dynamo.tree_map(lambda tensor: tensor.clone() if everything or tensor.dim() == 0 else tensor, outputs)


def size(outputs: Any) -> int:
    """Return the bytes of the tensors in ``outputs``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(outputs))


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    dynamo.tree_map(lambda tensor: found.append(tensor) or tensor, tree)
    return found


def owned(outputs: Iterable[Any], inputs: Iterable[Any]) -> list[Tensor]:
    """Return those of ``outputs`` that are in memory of the graph, and not in that of one of its ``inputs``."""
    theirs = {_memory(value) for value in inputs if isinstance(value, Tensor)} - {None}
    return [value for value in outputs if isinstance(value, Tensor) and _memory(value) not in theirs]


class Forward:
    """A forward of a graph. It is alive as long as its backward may still come.

    Attributes:
        over: The backward has begun, and will not come again.
        stale: Another step has begun, in which graphs write to the memory that the backward reads.
    """

    __slots__ = ("__weakref__", "over", "stale")

    def __init__(self) -> None:
        self.over = self.stale = False

    def begin_backward(self, *_: Any) -> None:
        """Called when its backward begins.

        Raises:
            RuntimeError: If it comes too late.
        """
        if self.stale:
            raise RuntimeError(
                "A backward has come in a later step than its forward, which ran as a CUDA graph."
                " In between, the memory of what the forward has kept for it may have been written to again, and the"
                " gradients would be wrong."
                " Go backward in the step of the forward, or use Compile(mode='auto') or Compile(mode='default'),"
                " which know no such limit."
            )
        self.over = not keeps_graph()


class Backwards:
    """Sees to it that no backward reads what the CUDA graphs of a later step have written over.

    Torch does not see that autograd holds on to what a replayed forward has saved.
    """

    def __init__(self) -> None:
        self._waiting: list[ref[Forward]] = []

    def watch(self, outputs: Any, inputs: Any) -> None:
        """Record that graphs return ``outputs`` in this step. Their backward must run in the same step."""
        given = {id(value) for value in _tensors(inputs)}
        nodes = {value.grad_fn for value in _tensors(outputs) if value.grad_fn is not None and id(value) not in given}
        if nodes:
            forward = Forward()
            for node in nodes:
                node.register_prehook(forward.begin_backward)  # which keeps it alive as long as autograd keeps the node
            self._waiting.append(ref(forward))

    def begin_step(self) -> None:
        """Called when a step begins."""
        for waiting in self._waiting:
            if (forward := waiting()) is not None and not forward.over:
                forward.stale = True
        self._waiting.clear()


class _Copy(torch.autograd.Function):
    """A copy that keeps its forward alive, and knows when its backward runs."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, forward: Forward) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.of = forward
        return tensor.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.of.begin_backward()
        return grad, None


class Slot:
    """A recording of a graph for one of the calls of a step, which is free again when its backward has been.

    What the graph returns is copied, since the next call writes over it. What the model puts aside in attributes or
    lists is an output of the graph too. An output that lies in memory of an input is returned as it is.

    Args:
        demand: The compiled graph.
    """

    def __init__(self, demand: Demand) -> None:
        self.recording, self._demand = Recording(), demand
        self.tried, self.recorded = False, 0  # CUDA graphs that its trial has recorded
        self._last: Callable[[], Forward | None] = lambda: None
        self._positions: list[int] | None = None  # of the outputs in memory of the graph

    @property
    def is_free(self) -> bool:
        """Whether a forward may write to its memory."""
        last = self._last()
        return last is None or last.over

    def run(self, run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the graph ``run`` returns for ``args``, in memory that the next call leaves alone."""
        with self._demand.using(self.recording):
            outputs = run(*args)
        outputs = [*outputs] if isinstance(outputs, (tuple, list)) else [outputs]
        if self._positions is None:  # a graph's outputs are always the same kind of thing
            ours = {id(value) for value in owned(outputs, args)}
            self._positions = [index for index, value in enumerate(outputs) if id(value) in ours]
        forward = Forward()
        for index in self._positions:
            output = outputs[index]
            outputs[index] = _Copy.apply(output, forward) if output.requires_grad else output.clone()
        # Torch does not see that autograd holds on to what a replayed forward has saved, and would write over it.
        self._last = ref(forward)
        return tuple(outputs)

    def retire(self) -> None:
        """Replay nothing more than a backward that may still come."""
        if self.is_free:
            self._demand.forget(self.recording)

    @property
    def is_unused(self) -> bool:
        """Whether nobody may read its memory any more."""
        return self.is_free and not self.recording.is_kept

    def close(self) -> None:
        """Free its memory, which must be unused. The device must have done all its work."""
        self._demand.forget(self.recording)
        self.recording.close()


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


class OwnGradients:
    """Memory for the gradients of ``module`` that no graph overwrites.

    The backward of a graph leaves its parameters' gradients in the graph's memory, where the next forward would
    overwrite what it is to add to, or what somebody looks at. They are moved when that forward comes, and not before:
    most are gone by then, since a step over master weights drops those that it has used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left = False
        self._modules: list[nn.Module] = []
        self._held: list[int] = []  # what they hold, by its ids
        self._parameters: list[nn.Parameter] = []  # alive, so that no id is another's later
        self._own: list[Tensor | None] = []
        self._bytes = 0  # of these, or more

    def leave(self) -> None:
        """Record that a backward may have left gradients in memory of a graph."""
        self._left = True

    def take_left(self) -> None:
        """Move what a backward has left and is still there; call it before any graph runs again."""
        if self._left:
            self.take()

    def take(self) -> None:
        """Move the gradients that are there into memory of their own."""
        self._left = False
        self._look()
        theirs, ours = [], []
        for index, (parameter, own) in enumerate(zip(self._parameters, self._own, strict=True)):
            grad = parameter.grad
            if grad is None or grad is own or grad.layout is not torch.strided:
                continue
            if own is None or not _alike(own, grad):
                with torch.inference_mode(mode=False):  # as a forward in it may be the one that comes
                    own = self._own[index] = torch.empty_like(grad)
                self._bytes += own.nbytes
            theirs.append(grad)
            ours.append(own)
            parameter.grad = own
        if ours:
            torch._foreach_copy_(ours, theirs)  # one launch, where a loop would have one for each

    def free_unused(self) -> None:
        """Free the memory that no gradient lies in, if it is much; call it before a backward, when most is in use."""
        if self._bytes > COPIED_BYTES:
            pairs = zip(self._parameters, self._own, strict=True)
            self._own = [own if parameter.grad is own else None for parameter, own in pairs]
            self._bytes = sum(own.nbytes for own in self._own if own is not None)

    def forget(self) -> None:
        """Free the memory that no gradient lies in; call it when no graph will run any more."""
        self._held, self._own = [], [None] * len(self._parameters)
        self._bytes = 0

    def _look(self) -> None:
        # Walking through all modules takes ten times as long as seeing that none of them holds anything else now.
        if self._held and self._held == _held(self._modules):
            return
        own = dict(zip(self._parameters, self._own, strict=True))
        self._modules, self._parameters = [*self._module.modules()], [*self._module.parameters()]
        self._held, self._own = _held(self._modules), [own.get(parameter) for parameter in self._parameters]


def _held(modules: list[nn.Module]) -> list[int]:
    """Return the ids of the parameters and modules that ``modules`` hold themselves, without a loop of Python's."""
    held = chain(map(_PARAMETERS, modules), map(_MODULES, modules))
    return [*map(id, chain.from_iterable(map(_VALUES, held)))]


_PARAMETERS, _MODULES, _VALUES = attrgetter("_parameters"), attrgetter("_modules"), methodcaller("values")


def _alike(one: Tensor, other: Tensor) -> bool:
    same_type = one.dtype is other.dtype and one.device == other.device
    return same_type and one.shape == other.shape and one.stride() == other.stride()
