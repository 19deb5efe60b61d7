"""What torch knows of an optimizer and tells nobody by a public name."""

from inspect import Parameter, signature

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["closure_of", "count_step", "flag_to_skip", "has_modes", "has_own_step", "needs_closure"]


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` steps in another way than its class; a scheduler's, which only counts, is none."""
    own = vars(optimizer).get("step")
    scaled = vars(optimizer).get("grad_scale") is not None  # by a GradScaler, whose gradients are to be divided
    return scaled or (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))


def count_step(optimizer: Optimizer) -> None:
    """Tell the schedulers of ``optimizer`` of a step that was made for it; they warn of one that was never made."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def flag_to_skip(optimizer: Optimizer) -> Tensor | None:
    """Return the number on the device that, where it is not 0, forbids the step: GradScaler's word to fused ones."""
    return vars(optimizer).get("found_inf")


def closure_of(optimizer: Optimizer) -> Parameter | None:
    """Return the argument by which the step of ``optimizer`` takes a closure, or None if it takes none."""
    return signature(type(optimizer).step).parameters.get("closure")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has to be given a closure, since it computes the loss several times in a step."""
    closure = closure_of(optimizer)
    return closure is not None and closure.default is Parameter.empty


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has other weights for evaluation, which its ``train`` and ``eval`` put in place."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
