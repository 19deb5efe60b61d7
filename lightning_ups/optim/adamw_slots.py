"""What a step of AdamW reads and writes, in columns, and where it lies.

The host goes through hundreds of tensors in each step, in which the device may have to wait for it. So what is asked
of every tensor is asked of a column at a time, by loops in C. No tensor is kept from step to step, and none is believed
to be where it was: others may move memory, load state and freeze parameters.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ups._compat.torch.tensors.tensors import local_of, plain_memory

__all__ = ["Kind", "Layout", "Slots", "are_plain", "gradient_column", "local_part", "slots_of"]

_ALIGNMENT, _VECTOR = 16, 8  # bytes of the widest load, and so many elements of a gradient or a copy
_PLAIN = {Tensor, nn.Parameter, type(None)}
_DEVICE, _DTYPE, _GRADIENT = attrgetter("device"), attrgetter("dtype"), attrgetter("grad")
_STEP, _AVERAGE, _SQUARE = map(itemgetter, ("step", "exp_avg", "exp_avg_sq"))


class Kind(NamedTuple):
    """What the weights of one launch have in common."""

    device: torch.device
    gradient: torch.dtype
    copy: torch.dtype | None
    aligned: bool  # whole vectors can be loaded, to the end


@dataclass(slots=True)
class Layout:
    """All that launches have to know of slots: those of equal ones are the same."""

    # Columns of the gradients, weights, averages, squares, steps and copies. A weight without a copy is there twice.
    addresses: list[list[int]]
    sizes: list[int]  # of the weights, in elements
    gradients: list[torch.dtype]
    copies: list[torch.dtype | None]

    def kinds(self, devices: Iterable[torch.device]) -> dict[Kind, list[int]]:
        """Return the places of the slots of each kind; ``devices`` are those of the weights."""
        found: dict[Any, list[int]] = defaultdict(list)
        gradient, weight, average, square, _, copy = self.addresses
        loaded = reduce(partial(map, or_), (gradient, weight, average, square, copy))
        aligned = [
            bits % _ALIGNMENT == 0 and size % _VECTOR == 0 for bits, size in zip(loaded, self.sizes, strict=True)
        ]
        for place, kind in enumerate(zip(devices, self.gradients, self.copies, aligned, strict=True)):
            found[kind].append(place)
        return {Kind(*kind): places for kind, places in found.items()}


@dataclass(slots=True)
class Slots:
    """Weights and what their step reads and writes: what is at one place of every column belongs together.

    It is all of one shape but for the step, contiguous, and float32 but for gradients and copies.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]  # how many were made, this one counted: one number on the device for each
    copies: list[Tensor | None]  # what the weights are written to as well, rounded

    def __len__(self) -> int:
        return len(self.weights)

    def columns(self) -> tuple[list[Any], ...]:
        """Return the columns, in the order of the arguments."""
        return self.weights, self.gradients, self.averages, self.squares, self.steps, self.copies

    def at(self, places: Sequence[int]) -> "Slots":
        """Return those at ``places``."""
        if len(places) == len(self):
            return self
        return Slots(*([column[place] for place in places] for column in self.columns()))

    def written(self) -> list[Tensor]:
        """Return what a step writes, but for the numbers of steps."""
        copies = (copy for copy in self.copies if copy is not None)
        return [*self.weights, *self.averages, *self.squares, *copies]

    def layout(self) -> Layout:
        """Return where all of it lies, read anew."""
        targets = [w if copy is None else copy for w, copy in zip(self.weights, self.copies, strict=True)]
        columns = (self.gradients, self.weights, self.averages, self.squares, self.steps, targets)
        return Layout(
            [[*map(Tensor.data_ptr, column)] for column in columns],
            [*map(Tensor.numel, self.weights)],
            [*map(_DTYPE, self.gradients)],
            [None if copy is None else copy.dtype for copy in self.copies],
        )


def slots_of(
    optimizer: Optimizer,
    weights: list[Tensor],
    *,
    gradients: list[Tensor | None],
    copies: Iterable[Tensor | None] = repeat(None),
) -> Slots:
    """Return slots for those of ``weights`` that have a gradient, with state as torch's own fused step makes it.

    Args:
        optimizer: Adam or AdamW, whose state is used, and created if it does not exist yet.
        weights: Contiguous tensors, whole or sharded; of a sharded one each rank steps its own part.
        gradients: Of each weight, or None.
        copies: The contiguous tensors that the weights are also written to, or None.
    """
    found: list[Any] = gradients
    copied = [*islice(copies, len(weights))]
    if any(map(is_, found, repeat(None))):
        there = [gradient is not None for gradient in found]
        weights, found, copied = [*compress(weights, there)], [*compress(found, there)], [*compress(copied, there)]
    steps, averages, squares = _state_of(optimizer, weights)
    if not are_plain(chain(weights, found, copied)):
        rows = map(_local_row, weights, found, averages, squares, steps, copied)
        return Slots(*map(list, zip(*rows, strict=True)))
    if not _are_contiguous(found):
        found = [gradient.contiguous() for gradient in found]
    return Slots(weights, found, averages, squares, steps, copied)


def _state_of(optimizer: Optimizer, weights: list[Tensor]) -> tuple[list[Tensor], ...]:
    states = [*map(optimizer.state.__getitem__, weights)]
    if not all(states):
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    steps, averages, squares = _columns(states)
    devices = [*map(_DEVICE, weights)]
    if [*map(_DEVICE, steps)] == devices and _are_contiguous(averages) and _are_contiguous(squares):
        return steps, averages, squares
    for state, device in zip(states, devices, strict=True):
        state["step"] = state["step"].to(device)  # of a step that was not fused, read from a checkpoint
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].contiguous(), state["exp_avg_sq"].contiguous()
    return _columns(states)


def _columns(states: list[Any]) -> tuple[list[Tensor], ...]:
    return [*map(_STEP, states)], [*map(_AVERAGE, states)], [*map(_SQUARE, states)]


def _local_row(
    weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor, copy: Tensor | None
) -> tuple[Tensor, ...]:
    if not isinstance(weight, DTensor):
        return plain_memory(weight), gradient.contiguous(), average, square, step, plain_memory(copy)
    assert isinstance(gradient, DTensor)
    if gradient.placements != weight.placements:
        gradient = gradient.redistribute(placements=weight.placements)
    if not local_part(gradient).is_contiguous():
        gradient = gradient.contiguous()
    return tuple(map(local_part, (weight, gradient, average, square, step, copy)))


def gradient_column(weights: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each of ``weights``, or None."""
    return [*map(_GRADIENT, weights)]


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether each of ``tensors`` is what it looks like: no shard, and of nobody's own class."""
    return {*map(type, tensors)} <= _PLAIN


def local_part(tensor: Tensor | None) -> Any:
    """Return the plain tensor that this rank has of ``tensor``."""
    return plain_memory(local_of(tensor))


def _are_contiguous(tensors: Iterable[Any]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))
