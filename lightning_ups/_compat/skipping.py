"""Leaving out an optimizer step by a flag on the device: the protocol of torch's GradScaler with fused optimizers."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["clear_skip", "skip_if", "skips_on_device"]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel reads a flag: torch's fused ones do, and those that stand for them."""
    stepped = _stepped(optimizer)
    fused = all(group.get("fused") for group in stepped.param_groups)
    return fused and bool(getattr(stepped, "_step_supports_amp_scaling", False))


def skip_if(optimizer: Optimizer, flag: Tensor) -> None:
    """Let the next step change nothing, neither parameters nor state, if ``flag`` (float32, no dimension) is not 0."""
    stepped = _stepped(optimizer)
    stepped.grad_scale, stepped.found_inf = None, flag  # type: ignore[attr-defined]


def clear_skip(optimizer: Optimizer) -> None:
    """Let steps be steps again."""
    stepped = _stepped(optimizer)
    for name in ("grad_scale", "found_inf"):
        vars(stepped).pop(name, None)


def _stepped(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "inner", None), Optimizer):
        optimizer = inner
    return optimizer
