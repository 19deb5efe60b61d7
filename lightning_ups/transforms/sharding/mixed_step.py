"""Steps sharded and unsharded parameters with one optimizer whose kernels accept one kind at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["kinds_of", "one_kind_at_a_time"]


def kinds_of(optimizer: Optimizer) -> list[Any]:
    """Return the kinds of parameters of ``optimizer``: a mesh for sharded ones, None for unsharded ones."""
    kinds: dict[Any, None] = {}
    for group in optimizer.param_groups:
        kinds.update(dict.fromkeys(_kind(p) for p in group["params"]))
    return [*kinds]


@contextmanager
def one_kind_at_a_time(optimizer: Optimizer) -> Iterator[None]:
    """Make each step of ``optimizer`` process the parameters one kind after another while the context is open.

    ``fused`` and ``foreach`` kernels take lists, and DTensor refuses a mixed list. Groups, state and schedulers are not
    affected.
    """
    if len(kinds_of(optimizer)) < 2 or not any(g.get("fused") or g.get("foreach") for g in optimizer.param_groups):
        yield
        return
    before = vars(optimizer).get("step")  # a scheduler's, which counts steps
    inner: Callable[..., Any] = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind in kinds_of(self):
            with _only(self, kind):
                inner()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch warns where its mark is missing
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]


@contextmanager
def _only(optimizer: Optimizer, kind: Any) -> Iterator[None]:
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if _kind(p) == kind]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _kind(parameter: Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
