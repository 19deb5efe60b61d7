"""Optimizers that let another one make the step, and what is read of the one inside."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, overload

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.optimizers import before_loading


class DelegatingOptimizer(Optimizer):
    """Evaluates the closure once, before the step, which a subclass lets another optimizer make."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.delegate_step(loss, has_closure=closure is not None)
        return loss

    @abstractmethod
    def delegate_step(self, loss: float | None, *, has_closure: bool) -> None:
        """Make the step; gradients are there, and ``loss`` is what the closure returned, if there was one."""


def go_by_the_name_of(known: Optimizer, ours: Optimizer) -> None:
    """Give the class of ``ours`` the name of that of ``known``, which it wraps.

    LearningRateMonitor and others name an optimizer by its class, and keep the name that it had.
    """
    ours.__class__ = _named(type(ours), type(known).__name__)


@cache
def _named(kind: type[Optimizer], name: str) -> type[Optimizer]:
    named = type(name, (kind,), {"__doc__": kind.__doc__})
    named.__module__, named.__qualname__ = kind.__module__, kind.__qualname__
    return named


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of the user's for which ``optimizer`` stands, or itself."""
    while isinstance(inner := getattr(optimizer, "inner", getattr(optimizer, "stepper", None)), Optimizer):
        optimizer = inner
    return optimizer


def refuse_state_of_others(optimizers: Iterable[Optimizer]) -> list[Callable[[], None]]:
    """Let each of ``optimizers`` call `check_options` before it loads a state, and return what undoes that."""
    return [before_loading(optimizer, _check) for optimizer in map(innermost, optimizers)]


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    check_options(optimizer, state_dict["param_groups"])


def check_options(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ``saved``, the groups of a state, if they lack an option that ``optimizer`` has, and have others.

    What its class fills in, for checkpoints of older versions, may be missing, and what only its constructor reads.
    """
    groups, optimizer = optimizer.param_groups, innermost(optimizer)
    options = [name for name in optimizer.defaults if all(name in group for group in groups)]
    has_others = any(group.keys() - {"param_names"} - optimizer.defaults.keys() - groups[0].keys() for group in saved)
    if has_others and _lacking(options, saved) and (lacking := _lacking(options, _filled_in(optimizer, saved))):
        name = type(optimizer).__name__
        raise ValueError(
            f"The checkpoint was saved by another optimizer than {name}: its groups have no {', '.join(lacking)}, which"
            f" {name} reads in every step. Resume with the optimizer that saved it, or begin with its weights alone:"
            " leave out ckpt_path, and call lightning_ups.state.checkpoint.load_weights in on_fit_start."
        )


def _lacking(options: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in options if any(name not in group for group in groups)]


def _filled_in(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    alike: Any = object.__new__(type(optimizer))
    vars(alike).update(vars(optimizer))
    alike.__setstate__({"state": defaultdict(dict), "param_groups": [{**group, "params": []} for group in groups]})
    return alike.param_groups
