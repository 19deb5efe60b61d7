"""A whole AdamW step over many tensors: the clip coefficient, the moments, the weights and their low-precision copies.

torch's own fused step wants gradients of the weights' type, and writes no copy. Around it a step with master weights
therefore reads and writes 48 bytes for each weight: it widens the gradients, multiplies them by the clip coefficient,
steps, and casts. In one pass it is 28, or 26 without a copy to write.

The host goes through hundreds of tensors in each step, in which the device may have to wait for it. So what is asked
of every tensor is asked of a column at a time, by loops in C. No tensor is kept from step to step, and none is believed
to be where it was: others may move memory, load state and freeze parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, itemgetter, or_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_ups._compat.optional.packages import has
from lightning_ups._compat.torch.optimizers import count_step, flag_to_skip, has_own_step
from lightning_ups._compat.torch.tensors.tensors import local_of, plain_memory

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


@dataclass(frozen=True, slots=True)
class Settings:
    """What a parameter group of Adam or AdamW asks for."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@torch.no_grad()
def reference_step(
    slots: Slots, settings: Settings, *, coefficient: Tensor | None = None, skip: Tensor | None = None
) -> None:
    """Make the step tensor by tensor: the specification, in float32 but for the two corrections."""
    if skip is not None and skip:
        return
    for weight, gradient, average, square, number, copy in zip(*slots.columns(), strict=True):
        gradient = gradient.float()
        if coefficient is not None:
            gradient = gradient * coefficient
        step = number.double()
        correction1 = (1 - settings.beta1**step).float()
        correction2 = (1 - settings.beta2**step).sqrt().float()
        weight.mul_(1 - settings.lr * settings.weight_decay)
        average.lerp_(gradient, 1 - settings.beta1)
        square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        denominator = (square.sqrt() / correction2).add_(settings.eps)
        weight.sub_(settings.lr / correction1 * average / denominator)
        if copy is not None:
            copy.copy_(weight)


class _Launch(Protocol):
    def find(self, addresses: list[Sequence[int]], sizes: list[int]) -> None: ...
    def __call__(self, settings: Settings, *, coefficient: Tensor | None, skip: Tensor | None) -> None: ...


class AdamWStep:
    """Makes AdamW's step in one kernel for all tensors of one kind; on a device that has none, by the specification.

    An object keeps the kernel's tables from step to step, so there is one for each parameter group. They are of the
    layout that the last step has found, and made anew when a step finds another.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._kinds: dict[Kind, list[int]] = {}
        self._launches: dict[Kind, _Launch | None] = {}

    @torch.no_grad()
    def __call__(
        self,
        slots: Slots,
        settings: Settings,
        *,
        coefficient: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Make one step; ``coefficient``, one number on the device, multiplies the gradients.

        Where ``skip``, one number on the device, is not 0, nothing changes.
        """
        if (layout := slots.layout()) != self._layout:
            self._lay_out(layout, map(_DEVICE, slots.weights))
        for kind, places in self._kinds.items():
            alike, launch = slots.at(places), self._launches[kind]
            torch._foreach_add_(alike.steps, 1 if skip is None else 1 - skip)
            if launch is None:
                reference_step(alike, settings, coefficient=coefficient, skip=skip)
                continue
            launch(settings, coefficient=coefficient, skip=skip)
            torch.autograd.graph.increment_version(alike.written())

    def _lay_out(self, layout: Layout, devices: Iterable[torch.device]) -> None:
        self._layout = None  # until all tables are made
        self._kinds = layout.kinds(devices)
        for kind, places in self._kinds.items():
            if kind not in self._launches:
                self._launches[kind] = _launch_of(kind)
            if (launch := self._launches[kind]) is not None:
                launch.find(
                    [[column[place] for place in places] for column in layout.addresses],
                    [layout.sizes[place] for place in places],
                )
        self._layout = layout


def _launch_of(kind: Kind) -> _Launch | None:
    if kind.device.type != "cuda":
        return None
    from lightning_ups.optim.adamw_triton import Launch

    return Launch(kind)


class OneKernel:
    """The step of an Adam or AdamW, made for it; `one_kernel` says for which."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._steps = [AdamWStep() for _ in optimizer.param_groups]

    def step(
        self,
        optimizer: Optimizer,
        settings: Sequence[Settings],
        *,
        coefficient: Tensor | None = None,
        gradients: Callable[[list[Tensor]], list[Tensor | None]] = gradient_column,
        copies: Callable[[list[Tensor]], Iterable[Tensor | None]] = lambda _: repeat(None),
    ) -> None:
        """Make a step with the weights' gradients times ``coefficient``; see `slots_of` for the rest."""
        while len(self._steps) < len(optimizer.param_groups):
            self._steps.append(AdamWStep())  # groups may be added
        with torch.no_grad():
            steps = self._steps[: len(settings)]  # some groups may be left out
            for step, group, wanted in zip(steps, optimizer.param_groups, settings, strict=True):
                weights = group["params"]
                slots = slots_of(optimizer, weights, gradients=gradients(weights), copies=copies(weights))
                step(slots, wanted, coefficient=coefficient, skip=flag_to_skip(optimizer))
                if not are_plain(weights):
                    # The kernel's writes are known of their memory; a sharded tensor has a count of its own.
                    torch.autograd.graph.increment_version([p for p in weights if isinstance(p, DTensor)])
        count_step(optimizer)


def one_kernel(optimizer: Optimizer, *, device: torch.device | None = None) -> list[Settings] | None:
    """Return the settings of each group of ``optimizer``, or None if one of them has to be stepped by torch.

    Args:
        optimizer: Of any class.
        device: Where its weights will be when they are stepped. None: where they are.
    """
    # Every step asks this: first of all what most of those that torch steps do not pass.
    if type(optimizer) not in (Adam, AdamW):
        return None
    first = optimizer.param_groups[0]["params"][:1]
    if first and not _has_kernel(device or first[0].device):
        return None
    with torch.no_grad():
        settings = [settings_of(optimizer, group, device=device) for group in optimizer.param_groups]
    return None if None in settings else [found for found in settings if found is not None]


def settings_of(optimizer: Optimizer, group: dict[str, Any], *, device: torch.device | None = None) -> Settings | None:
    """Return what ``group`` asks for, or None if it asks for what the one kernel does not do.

    That is another optimizer, a subclass, one whose ``step`` was replaced, AMSGrad, steps that can be captured or
    differentiated, maximizing, numbers that are tensors, ``fused=False`` or ``foreach=True``, weight decay that is not
    decoupled, and weights that are not contiguous in float32 on a GPU with Triton: on ``device``, if that is given.
    """
    if (asked := _asked_of(optimizer, group)) is None:
        return None
    weights: list[Tensor] = group["params"]
    if device is not None:  # their class may say that they are on the host
        weights = [weight if isinstance(weight, DTensor) else weight.detach() for weight in weights]
    devices = {*map(_DEVICE, weights)} if device is None else {device}
    return asked if all(map(_has_kernel, devices)) and _fit(weights) else None


def suits_one_kernel(optimizer: Optimizer) -> bool:
    """Return whether the step would be one kernel on a GPU with Triton, wherever the weights are now, fake ones too."""
    return all(
        _asked_of(optimizer, group) is not None
        and all(w.dtype is torch.float32 and w.is_contiguous() for w in group["params"])
        for group in optimizer.param_groups
    )


def _asked_of(optimizer: Optimizer, group: dict[str, Any]) -> Settings | None:
    if type(optimizer) not in (Adam, AdamW) or _asks_for_more(group):
        return None
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    if not all(isinstance(number, (int, float)) for number in numbers):
        return None
    if has_own_step(optimizer):
        return None
    if group["weight_decay"] and not group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)):
        return None
    return Settings(*map(float, numbers))


def _asks_for_more(group: dict[str, Any]) -> bool:
    switches = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
    return any(group.get(name) for name in switches) or group.get("fused") is False


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and has("triton")


def _fit(weights: Sequence[Tensor]) -> bool:
    # Every step asks this: first of all at once, which takes no call for each of plain weights.
    parts = weights if are_plain(weights) else [*map(local_part, weights)]
    plain = parts is weights or are_plain(parts)
    return plain and {*map(_DTYPE, weights)} <= {torch.float32} and all(map(Tensor.is_contiguous, parts))
