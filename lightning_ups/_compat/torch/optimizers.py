"""Private state and hooks of torch's optimizers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether the instance overrides the ``step`` of its class, other than by a scheduler's counter."""
    own = vars(optimizer).get("step")
    scaled = vars(optimizer).get("grad_scale") is not None  # by a GradScaler, whose gradients must be unscaled
    return scaled or (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether functions are registered that a step of ``optimizer`` calls."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def count_step(optimizer: Optimizer) -> None:
    """Count a step for the schedulers of ``optimizer``, which warn if there was none."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def flag_to_skip(optimizer: Optimizer) -> Tensor | None:
    """Return the device tensor that skips the step if it is not 0, which GradScaler passes to fused optimizers."""
    return vars(optimizer).get("found_inf")


def closure_of(optimizer: Optimizer) -> Parameter | None:
    """Return the closure parameter of the step of ``optimizer``, or None if it has none."""
    return signature(type(optimizer).step).parameters.get("closure")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` requires a closure, because it computes the loss several times in a step."""
    closure = closure_of(optimizer)
    return closure is not None and closure.default is Parameter.empty


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has other weights for evaluation, which its ``train`` and ``eval`` swap."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def before_loading(optimizer: Optimizer, hook: Callable[[Optimizer, dict[str, Any]], None]) -> Callable[[], None]:
    """Call ``hook``, once, before ``optimizer`` loads a state; return a function that removes it, if hooks work."""
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if hooks is None or hook in hooks.values():
        return lambda: None
    return optimizer.register_load_state_dict_pre_hook(hook).remove


@contextmanager
def hooked_once(optimizer: Optimizer) -> Iterator[None]:
    """Call the step hooks of ``optimizer`` before and after the context, and not at the steps inside."""
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
    """Call the state dict hooks of ``optimizer`` when ``inner`` creates or loads its state dict."""
    for name in _STATE_DICT_HOOKS:
        setattr(optimizer, name, getattr(inner, name))


_STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
