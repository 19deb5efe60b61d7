"""AdamW with weight decay for matrices only."""

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["adamw", "decay_groups"]

_FUSED_DEVICES = ("cpu", "cuda")


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, object]]:
    """Return the trainable ``parameters`` as optimizer groups: only matrices decay, not gains, biases and scalars."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    module: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, fused: bool | None = None
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of ``module``.

    Args:
        module: The module.
        lr: The peak learning rate.
        betas: Decay of the averages of gradient and squared gradient.
        weight_decay: Of matrices; see `decay_groups`.
        fused: Use torch's fused AdamW. None: on CPU and CUDA.
    """
    groups = decay_groups(module.parameters(), weight_decay=weight_decay)
    if fused is None:
        fused = all(parameter.device.type in _FUSED_DEVICES for parameter in module.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
