"""Optimizer steps of Lightning: callbacks before and after the closure, skipped steps, schedulers."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_ups._compat.patches import applied

_TARGET = "lightning.pytorch.plugins.precision:Precision._after_closure"


def after_closure(precision: Any, do: Callable[[Optimizer], None]) -> AbstractContextManager[None]:
    """Call ``do`` right before each optimizer step, after all hooks and clipping, while the context is open.

    A step hook of the optimizer is called too early: before the closure that computes gradients.

    Args:
        precision: The precision plugin of a Trainer with automatic optimization.
        do: Called with the optimizer that steps next.
    """

    def ending(stock: Callable[..., None]) -> Callable[..., None]:
        def closed(model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            stock(model, optimizer, *args, **kwargs)
            do(optimizer)

        return closed

    return applied(_TARGET, ending, owner=precision)


def in_training_step(module: LightningModule) -> bool:
    """Return whether the ``training_step`` of ``module`` runs now, and no other hook of it or of a callback."""
    return module._current_fx_name == "training_step"


def before_hooks_of_a_step(precision: Any, do: Callable[[Any, Optimizer], None]) -> AbstractContextManager[None]:
    """Call ``do`` after each backward, before anything changes the gradients, while the context is open.

    Args:
        precision: The precision plugin of a Trainer.
        do: Called with the module and the optimizer that steps next.
    """

    def beginning(stock: Callable[..., None]) -> Callable[..., None]:
        def closed(model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            do(model, optimizer)
            stock(model, optimizer, *args, **kwargs)

        return closed

    return applied(_TARGET, beginning, owner=precision)


def was_skipped(module: LightningModule, outputs: Any, *, began_at: int) -> bool:
    """Return whether ``training_step`` asked to skip the batch, by returning None.

    With manual optimization it may always return None; an optimizer step shows that the batch was used. Optimizers that
    are used without Lightning's wrapper do not count global steps: they get a hook at the end of the first batch that
    seems to have been skipped, which therefore counts as skipped.

    Args:
        module: The module in training.
        outputs: The argument of the hook.
        began_at: The global step when the batch began.
    """
    if module.automatic_optimization:
        return not outputs or (isinstance(outputs, dict) and outputs.get("loss") is None)
    if outputs or module.trainer.global_step != began_at:
        return False
    # a list: every optimizer must be asked
    stepped = [_has_stepped(optimizer, module.trainer) for optimizer in module.trainer.optimizers]
    return not any(stepped)


class _Heard:
    """Detects the steps of an optimizer while it is asked for them at each batch."""

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self.trainer = ref(trainer)
        self.asked_in = self.stepped_in = -1  # batches of this trainer
        self.handle = optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        trainer = self.trainer()
        self.stepped_in = -1 if trainer is None else trainer.fit_loop.total_batch_idx
        if trainer is None or self.asked_in < self.stepped_in - 1:
            self.handle.remove()
            _heard.pop(optimizer, None)


_heard: WeakKeyDictionary[Optimizer, _Heard] = WeakKeyDictionary()


def _has_stepped(optimizer: Optimizer, trainer: Trainer) -> bool:
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        return False  # an optimizer class without hooks
    heard = _heard.get(optimizer)
    if heard is not None and heard.trainer() is not trainer:
        heard.handle.remove()
    if heard is None or heard.trainer() is not trainer:
        heard = _heard[optimizer] = _Heard(optimizer, trainer)
    heard.asked_in = trainer.fit_loop.total_batch_idx
    return heard.stepped_in == heard.asked_in


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel reads a flag, as torch's fused ones and their replacements do."""
    stepped = _stepped(optimizer)
    fused = all(group.get("fused") for group in stepped.param_groups)
    # Its first step creates the buffer from the gradient; a zero buffer gives the same only without dampening.
    damped = isinstance(stepped, SGD) and any(group["dampening"] for group in stepped.param_groups)
    return fused and not damped and bool(getattr(stepped, "_step_supports_amp_scaling", False))


def skip_if(optimizer: Optimizer, flag: Tensor) -> None:
    """Let the next step change nothing, neither parameters nor state, if ``flag`` (0-dim float32) is not 0."""
    stepped = _stepped(optimizer)
    if isinstance(stepped, SGD):
        _make_buffers(stepped)
    stepped.grad_scale, stepped.found_inf = None, flag  # type: ignore[attr-defined]


def clear_skip(optimizer: Optimizer) -> None:
    """Let the next steps take effect again."""
    stepped = _stepped(optimizer)
    for name in ("grad_scale", "found_inf"):
        vars(stepped).pop(name, None)


def _make_buffers(optimizer: SGD) -> None:
    # If the first step is skipped, torch's fused kernel leaves an uninitialized buffer.
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _stepped(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "inner", None), Optimizer):
        optimizer = inner
    return optimizer


def bind_scheduler(scheduler: Any, new: Mapping[Optimizer, Optimizer]) -> None:
    """Make ``scheduler``, and schedulers inside it, drive ``new[optimizer]`` instead of ``optimizer``."""
    for inner in getattr(scheduler, "_schedulers", ()):  # SequentialLR and ChainedScheduler
        bind_scheduler(inner, new)
    later = new.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
    if later is not None:
        scheduler.optimizer = later
        _track_steps(later)


def _track_steps(optimizer: Optimizer) -> None:
    # Torch's schedulers mark the `step` of their optimizer when they are created, and warn if the mark is missing.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function = type(optimizer).step

    @wraps(function)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        return function(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
