"""Measures what recomputed blocks keep for backward, and checks that the second run of a block equals its first."""

import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ups._compat.torch.tensors.autograd import (
    has_values,
    operators_seen_by,
    outside_modes,
    saves_seen_by,
    storages,
)
from lightning_ups._compat.torch.tensors.ops import Operator

Storages = dict[Any, int]  # bytes by storage, so that shared memory counts once

_NUMBERS = 4096  # of each tensor, at most
_OF_ANOTHER_PATH = ("not found in storage",)  # text of a selective checkpoint if other operators run
_CAUSE = (
    "Its forward depends on state that changes between the two runs: a list, a dictionary or an object that it"
    " modifies, another random generator, or global state."
)
_CURE = (
    "Leave the block out with ActivationCheckpoint(blocks=[...]), or keep such state in a"
    " buffer or a plain attribute of the module."
)

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


class Samples:
    """Samples of what the first run of a block saves, compared with those of the second.

    A few values of each tensor, so that the first step stays cheap. The comparison is tolerant: kernels may differ in
    the last bits.
    """

    def __init__(self) -> None:
        self._first: list[torch.Tensor | None] = []
        self._again: list[torch.Tensor | None] = []

    def see_first(self, tensor: torch.Tensor) -> None:
        """Sample a tensor that the first run saves."""
        self._first.append(_sample(tensor))

    def see_again(self, tensor: torch.Tensor) -> None:
        """Sample a tensor that the second run saves."""
        self._again.append(_sample(tensor))

    def check(self, name: str) -> None:
        """Warn if the second run of the block ``name`` has saved other values than the first.

        A kernel may leave part of a saved tensor uninitialized, without any effect on later tensors. (There is also no
        effect if products are kept and a difference comes before one.) Synchronizes.

        Raises:
            RuntimeError: If later tensors differ, too.
        """
        apart = self._apart()
        if True not in apart:
            return
        after = apart[apart.index(True) :]
        if 1 < after.count(True) > len(after) / 2:
            raise RuntimeError(
                f"ActivationCheckpoint recomputed {name} for backward, and the result differs from that of the forward:"
                f" gradients would be wrong. {_CAUSE} {_CURE}"
            ) from None  # usually the run was just ended by torch, once it had all that backward needs
        warnings.warn(
            f"ActivationCheckpoint recomputed {name} for backward, and {apart.count(True)} of {len(apart)} tensors"
            " differ from those of the forward. Unless these contain memory that a kernel leaves uninitialized,"
            f" gradients are wrong. {_CAUSE} {_CURE}",
            stacklevel=2,
        )

    def _apart(self) -> list[bool]:
        pairs = [
            (one, other)
            for one, other in zip(self._first, self._again, strict=False)  # the second run stops as early as it can
            if one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype
        ]
        self._first, self._again = [], []
        if not pairs:
            return []
        with outside_modes(), torch.no_grad():
            # Non-finite values are not compared.
            return [
                bool(((one.float() - other.float()).norm() > _tolerance(one) * one.float().norm()).item())
                for one, other in pairs
            ]


def _tolerance(tensor: torch.Tensor) -> float:
    return 1e-3 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if not (tensor.is_floating_point() or tensor.dtype is torch.bool) or not has_values(tensor):
        return None
    with outside_modes(), torch.no_grad():
        return tensor.detach()[_places(tensor.shape)].clone()


def _places(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a slice of each dimension, which together select a few values as a view."""
    left, parts = _NUMBERS, []
    for i, size in enumerate(shape):
        part = max(1, min(size, round(left ** (1 / (len(shape) - i)))))
        parts.append(slice(None, None, max(1, -(-size // part))))
        left //= part
    return tuple(parts)


def note_recomputed_otherwise(error: BaseException, *, name: str) -> None:
    """Add an explanation to ``error`` if the second run of a block called other operators than the first.

    Args:
        error: The error that ended the run.
        name: The last block that was recomputed.
    """
    if isinstance(error, CheckpointError) or any(words in str(error) for words in _OF_ANOTHER_PATH):
        error.add_note(
            f"ActivationCheckpoint recomputed {name} for backward, and it called other operators than the forward."
            f" {_CAUSE} {_CURE}"
        )
