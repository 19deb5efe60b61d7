"""A whole AdamW step over many tensors: the clip coefficient, the moments, the weights and their low-precision copies.

torch's own fused step wants gradients of the weights' type, and writes no copy. Around it a step with master weights
therefore reads and writes 48 bytes for each weight: it widens the gradients, multiplies them by the clip coefficient,
steps, and casts. In one pass it is 28, or 26 without a copy to write.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_ups._compat.optimizers import count_step, flag_to_skip, has_own_step
from lightning_ups._compat.optional import has
from lightning_ups._compat.tensors import local_of, plain_memory

__all__ = [
    "AdamWStep",
    "OneKernel",
    "Settings",
    "Slot",
    "one_kernel",
    "reference_step",
    "settings_of",
    "slots_of",
    "suits_one_kernel",
]


_ALIGNMENT, _VECTOR = 16, 8  # bytes of the widest load, and so many elements of a gradient or a copy


@dataclass(frozen=True, slots=True)
class Settings:
    """What a parameter group of Adam or AdamW asks for.

    Args:
        lr: The learning rate.
        beta1: Decay of the average of the gradients.
        beta2: Decay of the average of their squares.
        eps: Added to the root of the latter.
        weight_decay: The part of a weight that a step takes away, times the learning rate.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(slots=True)  # not frozen: there is one for each weight and step
class Slot:
    """One weight and what its step reads and writes; all of one shape but for ``step``, and contiguous.

    Args:
        weight: float32.
        gradient: Of any floating-point type.
        average: Of the gradients, float32.
        square: The average of their squares, float32.
        step: How many steps were made, this one counted: one float32 number on the device.
        copy: What the weight is written to as well, rounded to its type.

    Attributes:
        addresses: Of the tensors, in that order but for the gradient, which comes first, and a weight that has no copy,
            which is there twice.
        kind: What the slots of one launch have in common; its last part is whether whole vectors can be loaded, to the
            end.
    """

    weight: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor
    step: Tensor
    copy: Tensor | None = None
    addresses: tuple[int, ...] = field(init=False)
    kind: tuple[torch.device, torch.dtype, torch.dtype | None, bool] = field(init=False)

    def __post_init__(self) -> None:  # addresses are read in each step, since others may move what they are of
        weight, copy = self.weight, self.copy
        gradient, here = self.gradient.data_ptr(), weight.data_ptr()
        average, square = self.average.data_ptr(), self.square.data_ptr()
        to, dtype = (here, None) if copy is None else (copy.data_ptr(), copy.dtype)
        self.addresses = gradient, here, average, square, self.step.data_ptr(), to
        aligned = (gradient | here | average | square | to) % _ALIGNMENT == 0 and weight.numel() % _VECTOR == 0
        self.kind = weight.device, self.gradient.dtype, dtype, aligned

    def written(self) -> list[Tensor]:
        """Return what a step writes."""
        return [self.weight, self.average, self.square, *([] if self.copy is None else [self.copy])]


@torch.no_grad()
def reference_step(
    slots: Iterable[Slot], settings: Settings, *, coefficient: Tensor | None = None, skip: Tensor | None = None
) -> None:
    """Make the step tensor by tensor: the specification, in float32 but for the two corrections."""
    if skip is not None and skip:
        return
    for slot in slots:
        gradient = slot.gradient.float()
        if coefficient is not None:
            gradient = gradient * coefficient
        step = slot.step.double()
        correction1 = (1 - settings.beta1**step).float()
        correction2 = (1 - settings.beta2**step).sqrt().float()
        slot.weight.mul_(1 - settings.lr * settings.weight_decay)
        slot.average.lerp_(gradient, 1 - settings.beta1)
        slot.square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        denominator = (slot.square.sqrt() / correction2).add_(settings.eps)
        slot.weight.sub_(settings.lr / correction1 * slot.average / denominator)
        if slot.copy is not None:
            slot.copy.copy_(slot.weight)


class AdamWStep:
    """Makes AdamW's step in one kernel for all tensors of one kind; on a device that has none, by the specification.

    An object keeps the kernel's tables from step to step, so there is one for each parameter group.
    """

    def __init__(self) -> None:
        self._launches: dict[Hashable, Callable[..., None]] = {}

    @torch.no_grad()
    def __call__(
        self,
        slots: Sequence[Slot],
        settings: Settings,
        *,
        coefficient: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Make one step; ``coefficient``, one number on the device, multiplies the gradients.

        Where ``skip``, one number on the device, is not 0, nothing changes.
        """
        kinds: dict[Hashable, list[Slot]] = defaultdict(list)
        for slot in slots:
            kinds[slot.kind].append(slot)
        for kind, alike in kinds.items():
            torch._foreach_add_([slot.step for slot in alike], 1 if skip is None else 1 - skip)
            if alike[0].weight.device.type != "cuda":
                reference_step(alike, settings, coefficient=coefficient, skip=skip)
                continue
            if kind not in self._launches:
                from lightning_ups.optim.adamw_triton import Launch

                self._launches[kind] = Launch()
            self._launches[kind](alike, settings, coefficient=coefficient, skip=skip)
            torch.autograd.graph.increment_version([tensor for slot in alike for tensor in slot.written()])


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
        gradient: Callable[[Tensor], Tensor | None] = lambda weight: weight.grad,
        copy: Callable[[Tensor], Tensor | None] = lambda _: None,
    ) -> None:
        """Make a step with the weights' gradients times ``coefficient``; see `slots_of` for the rest."""
        while len(self._steps) < len(optimizer.param_groups):
            self._steps.append(AdamWStep())  # groups may be added
        with torch.no_grad():
            steps = self._steps[: len(settings)]  # some groups may be left out
            for step, group, wanted in zip(steps, optimizer.param_groups, settings, strict=True):
                slots = slots_of(optimizer, group["params"], gradient=gradient, copy=copy)
                step(slots, wanted, coefficient=coefficient, skip=flag_to_skip(optimizer))
                # The kernel's writes are known of their memory; a sharded tensor has a count of its own.
                torch.autograd.graph.increment_version([p for p in group["params"] if isinstance(p, DTensor)])
        count_step(optimizer)


@torch.no_grad()
def one_kernel(optimizer: Optimizer, *, device: torch.device | None = None) -> list[Settings] | None:
    """Return the settings of each group of ``optimizer``, or None if one of them has to be stepped by torch.

    Args:
        optimizer: Of any class.
        device: Where its weights will be when they are stepped. None: where they are.
    """
    settings = [settings_of(optimizer, group, device=device) for group in optimizer.param_groups]
    return None if None in settings else [found for found in settings if found is not None]


def settings_of(optimizer: Optimizer, group: dict[str, Any], *, device: torch.device | None = None) -> Settings | None:
    """Return what ``group`` asks for, or None if it asks for what the one kernel does not do.

    That is another optimizer, a subclass, one whose ``step`` was replaced, AMSGrad, steps that can be captured or
    differentiated, maximizing, numbers that are tensors, ``fused=False`` or ``foreach=True``, weight decay that is not
    decoupled, and weights that are not contiguous in float32 on a GPU with Triton: on ``device``, if that is given.
    """
    if not (all(map(_is_ours, group["params"])) if device is None else _will_be_ours(group["params"], device)):
        return None
    return _asked_of(optimizer, group)


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


def _is_ours(weight: Tensor) -> bool:
    return _has_kernel(weight.device) and _fits(weight)


def _will_be_ours(weights: Iterable[Tensor], device: torch.device) -> bool:
    return _has_kernel(device) and all(_fits(w if isinstance(w, DTensor) else w.detach()) for w in weights)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and has("triton")


def _fits(weight: Tensor) -> bool:
    if weight.dtype is not torch.float32:
        return False
    local = _local(weight)
    return type(local) in (Tensor, nn.Parameter) and local.is_contiguous()


def slots_of(
    optimizer: Optimizer,
    weights: Iterable[Tensor],
    *,
    gradient: Callable[[Tensor], Tensor | None],
    copy: Callable[[Tensor], Tensor | None] = lambda _: None,
) -> list[Slot]:
    """Return a slot for each of ``weights`` that has a gradient, with state as torch's own fused step makes it.

    Args:
        optimizer: Adam or AdamW, whose state is used, and made where there is none yet.
        weights: Contiguous tensors, whole or sharded; of a sharded one each rank steps its own part.
        gradient: Returns a weight's gradient, or None.
        copy: Returns the contiguous tensor that a weight is also written to, or None.
    """
    slots = []
    for weight in weights:
        if (found := gradient(weight)) is None:
            continue
        state = optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        step, average, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
        if step.device != weight.device:  # of a step that was not fused, read from a checkpoint
            step = state["step"] = step.to(weight.device)
        if not (average.is_contiguous() and square.is_contiguous()):
            average, square = state["exp_avg"], state["exp_avg_sq"] = average.contiguous(), square.contiguous()
        low = copy(weight)
        if isinstance(weight, DTensor):
            assert isinstance(found, DTensor)
            if found.placements != weight.placements:
                found = found.redistribute(placements=weight.placements)
            if not _local(found).is_contiguous():
                found = found.contiguous()
            slots.append(Slot(*map(_local, (weight, found, average, square, step, low))))
        else:
            slots.append(Slot(plain_memory(weight), found.contiguous(), average, square, step, plain_memory(low)))
    return slots


def _local(tensor: Tensor | None) -> Any:
    return plain_memory(local_of(tensor))
