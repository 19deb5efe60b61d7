"""Hooks of optimizers that stand for others, or make a step in several."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["before_loading", "hooked_once", "share_state_dict_hooks"]


def before_loading(optimizer: Optimizer, hook: Callable[[Optimizer, dict[str, Any]], None]) -> Callable[[], None]:
    """Call ``hook``, once, before ``optimizer`` loads a state, and return what undoes it; some optimizers take none."""
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if hooks is None or hook in hooks.values():
        return lambda: None
    return optimizer.register_load_state_dict_pre_hook(hook).remove


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


def share_state_dict_hooks(optimizer: Optimizer, inner: Optimizer) -> None:
    """Let hooks that are given to ``optimizer`` be called when ``inner`` makes its state dict, or loads one."""
    for name in _STATE_DICT_HOOKS:
        setattr(optimizer, name, getattr(inner, name))


_STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
