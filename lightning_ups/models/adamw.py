"""AdamW as language models use it: matrices decay, vectors do not."""

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["adamw", "decay_groups"]

# Where torch has a kernel that makes the whole step; elsewhere torch chooses.
_FUSED_DEVICES = ("cpu", "cuda")


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, object]]:
    """Return the trainable ``parameters`` as optimizer groups: matrices decay; gains, biases and scalars do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    module: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, fused: bool | None = None
) -> torch.optim.AdamW:
    """Return AdamW over the parameters that ``module`` has now.

    Args:
        module: Its trainable parameters are optimized, a tied one once.
        lr: The peak learning rate.
        betas: Decay of the averages of gradient and squared gradient.
        weight_decay: Of matrices; see `decay_groups`.
        fused: One kernel for the whole step. None: yes on CPU and CUDA.
    """
    groups = decay_groups(module.parameters(), weight_decay=weight_decay)
    if fused is None:
        fused = all(parameter.device.type in _FUSED_DEVICES for parameter in module.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
