"""Hooks around the step of an optimizer that makes it in several."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

__all__ = ["hooked_once"]


@contextmanager
def hooked_once(optimizer: Optimizer) -> Iterator[None]:
    """Call the hooks of ``optimizer`` before and after the context, and not at the steps inside."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in before.values():
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    for hook in after.values():
        hook(optimizer, (), {})
