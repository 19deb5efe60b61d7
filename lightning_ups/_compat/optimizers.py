"""What torch knows of an optimizer and tells nobody by a public name."""

from torch.optim import Optimizer

__all__ = ["has_step_hooks"]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks were registered around the steps of ``optimizer``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
