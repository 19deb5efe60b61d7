"""Leaving out an optimizer step by a flag on the device: the protocol of torch's GradScaler with fused optimizers."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["clear_skip", "skip_if", "skips_on_device"]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel reads a flag: torch's fused ones do, and those that stand for them."""
    stepped = _stepped(optimizer)
    fused = all(group.get("fused") for group in stepped.param_groups)
    # Its first step makes the buffer, as that step's gradient; a buffer of zeros is the same without dampening alone.
    damped = isinstance(stepped, SGD) and any(group["dampening"] for group in stepped.param_groups)
    return fused and not damped and bool(getattr(stepped, "_step_supports_amp_scaling", False))


def skip_if(optimizer: Optimizer, flag: Tensor) -> None:
    """Let the next step change nothing, neither parameters nor state, if ``flag`` (float32, no dimension) is not 0."""
    stepped = _stepped(optimizer)
    if isinstance(stepped, SGD):
        _make_buffers(stepped)
    stepped.grad_scale, stepped.found_inf = None, flag  # type: ignore[attr-defined]


def clear_skip(optimizer: Optimizer) -> None:
    """Let steps be steps again."""
    stepped = _stepped(optimizer)
    for name in ("grad_scale", "found_inf"):
        vars(stepped).pop(name, None)


def _make_buffers(optimizer: SGD) -> None:
    # Where the first step is skipped, torch's fused kernel leaves a buffer that nobody has written to.
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _stepped(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "inner", None), Optimizer):
        optimizer = inner
    return optimizer
