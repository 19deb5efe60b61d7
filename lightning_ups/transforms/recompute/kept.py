"""Measures what recomputed blocks keep for backward."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ups._compat.torch.tensors.autograd import operators_seen_by, saves_seen_by, storages
from lightning_ups._compat.torch.tensors.ops import Operator
from lightning_ups.transforms.recompute.determinism import Samples

__all__ = ["CALLED_TRACED", "TRACED", "TRACED_IDLE", "Copies", "Kept", "Measurement"]

Storages = dict[Any, int]  # bytes by storage, so that shared memory counts once

TRACED: set[Callable[..., Any]] = set()  # recomputed forwards that Dynamo has traced
TRACED_IDLE: set[Callable[..., Any]] = set()  # those that it has traced when nothing required a gradient
# the operators that they call, if results of operators are selected
CALLED_TRACED: dict[Callable[..., Any], set[Operator]] = {}


class Copies:
    """Copies of arguments. Blocks share the copy of an argument that needs no gradient, such as a mask."""

    def __init__(self) -> None:
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``."""
        if tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        version = None if tensor.is_inference() else tensor._version
        shared = self._shared.get(tensor)
        if shared is None or version is None or shared[0] != version:
            shared = self._shared[tensor] = (version, tensor.clone())
        return shared[1]

    def clear(self) -> None:
        """Drop all copies."""
        self._shared.clear()


class Kept:
    """What blocks keep for backward, as far as they have run.

    The first eager forward of a block that has something to keep is measured, at the cost of a call for each tensor
    that autograd saves. For a compiled block, it is only known that its code was traced with its recomputation, in this
    process: equal blocks, and later fits, share that code.

    Args:
        save_less: Whether a block that writes in place to a result to be kept keeps only its arguments.
    """

    def __init__(self, *, save_less: bool = False) -> None:
        self.save_less = save_less  # see the class
        self.saves_nothing: set[nn.Module] = set()  # blocks that keep only their arguments
        self.writes_arguments: set[nn.Module] = set()  # blocks that need copies of their arguments
        self.copies = Copies()
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        self.measured: set[nn.Module] = set()
        self.idle: set[nn.Module] = set()  # ran with nothing to keep: all is frozen, or gradients are off
        self.watches = False  # whether to record the operators of eager blocks, at the cost of a call for each
        self.called_eagerly: set[Operator] = set()
        self.names: dict[nn.Module, str] = {}  # for errors
        self.ran_again: nn.Module | None = None  # the block that was recomputed last
        self._without: Storages = {}
        self._with: Storages = {}

    @property
    def called(self) -> set[Operator]:
        """The operators that blocks called, if operators are selected; for eager blocks only if ``watches``."""
        return self.called_eagerly.union(*(CALLED_TRACED.get(forward, ()) for forward in self.forwards.values()))

    @property
    def num_ran(self) -> int:
        """The number of blocks that ran and are recomputed in backward."""
        compiled = (block for block, forward in self.forwards.items() if forward in TRACED and block not in self.idle)
        return len(self.measured.union(compiled))

    @property
    def num_idle(self) -> int:
        """The number of blocks that ran so far with nothing to recompute."""
        compiled = (block for block, forward in self.forwards.items() if forward in TRACED_IDLE - TRACED)
        return len(self.idle.union(compiled))

    @property
    def bytes_without(self) -> int:
        """The bytes that one call of each measured block would keep without recomputation, not counting parameters."""
        return sum(self._without.values())

    @property
    def bytes_kept(self) -> int:
        """The bytes that the measured blocks keep, including their arguments."""
        return sum(self._with.values())

    def name(self, block: nn.Module) -> str:
        """Return the name of ``block`` for errors."""
        name, kind = self.names.get(block), type(block).__name__
        return kind if name is None else f"{name} ({kind})"

    def add(self, block: nn.Module, *, saved: Storages, kept: Iterable[torch.Tensor]) -> None:
        """Count one call of ``block`` that saved ``saved`` and keeps ``kept`` instead, as it is recomputed."""
        if not saved:
            self.idle.add(block)
            return
        self.measured.add(block)
        own = _bytes_of([*block.parameters(), *block.buffers()])
        self._without |= {memory: size for memory, size in saved.items() if memory not in own}
        self._with |= {memory: size for memory, size in _bytes_of(kept).items() if memory not in own}


class Measurement:
    """The function that a checkpoint runs twice, recording what its first run saves and writes to.

    Args:
        run: The function.
        ops: The operators whose results are kept from the next call on.
        called: Receives the operators that the first run calls.
        name: The name of the block, for errors.

    Raises:
        RuntimeError: In the second run, if it saves other values.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        *,
        ops: Container[Operator] = (),
        called: set[Operator] | None = None,
        name: str = "a block",
    ) -> None:
        self._run, self._ops, self._called, self._name = run, ops, called if called is not None else set(), name
        self._samples = Samples()
        self._ran = False
        self.saved: Storages = {}
        self.results: list[torch.Tensor] = []  # the results of the operators
        self._written: Storages = {}

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if self._ran:
            return self._run_again(*args)
        self._ran = True
        with saves_seen_by(self._see):
            if not self._ops:
                return self._run(*args)
            with operators_seen_by(self._see_called, writes=lambda t: self._written.update(storages(t))):
                return self._run(*args)

    def _run_again(self, *args: Any) -> Any:
        samples, self._samples = self._samples, Samples()  # nothing is known about a third run
        try:
            with saves_seen_by(samples.see_again):
                return self._run(*args)
        finally:
            samples.check(self._name)

    @property
    def writes_to_results(self) -> bool:
        """Whether a result that is to be kept was written to, even if no version counter recorded it."""
        return not self._written.keys().isdisjoint(_bytes_of(self.results))

    def _see_called(self, op: Operator, result: Any) -> None:
        self._called.add(op)
        if op in self._ops:
            self.results += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def _see(self, tensor: torch.Tensor) -> None:
        # Under FSDP2 a parameter is unsharded only within the block, so it is identified by its class, not its memory.
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            self.saved.update(storages(tensor))
        self._samples.see_first(tensor)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> Storages:
    return {memory: size for tensor in tensors for memory, size in storages(tensor)}
