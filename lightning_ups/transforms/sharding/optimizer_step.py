"""One optimizer step: its state, and optimizers that cannot step sharded parameters as they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Texts of DTensor for operations without a sharding rule, in torch 2.11 to 2.13.
_ABOUT_SHARDS = ("DTensor", "placement", "sharding strategy", "Sharding propagation", "sharded dimension")


@dataclass
class StepState:
    """The state from the first forward of an optimizer step until the optimizer has stepped.

    An evaluation step has its own state.

    Args:
        number: The number of earlier optimizer steps.
        name: The method of the module that runs, or ran last.
        is_manual: Whether ``training_step`` calls backward and steps optimizers itself.
        accumulates: Whether the current microbatch is not the last.
        has_accumulated: Whether the previous microbatch was not the last.
    """

    number: int = 0
    name: str = "training_step"
    is_manual: bool = False
    accumulates: bool = False
    has_accumulated: bool = False

    @property
    def is_training(self) -> bool:
        """Whether a backward may follow."""
        return self.name == "training_step"


def kinds_of(optimizer: Optimizer) -> list[Any]:
    """Return the kinds of parameters of ``optimizer``: a mesh for sharded ones, None for unsharded ones."""
    kinds: dict[Any, None] = {}
    for group in optimizer.param_groups:
        kinds.update(dict.fromkeys(_kind(p) for p in group["params"]))
    return [*kinds]


@contextmanager
def one_kind_at_a_time(optimizer: Optimizer) -> Iterator[None]:
    """Make each step of ``optimizer`` process the parameters one kind after another while the context is open.

    ``fused`` and ``foreach`` kernels take lists, and DTensor refuses a mixed list. On a GPU, ``foreach=None`` chooses
    them. Groups, state and schedulers are not affected.
    """
    takes_lists = any(g.get("fused") or g.get("foreach", False) is not False for g in optimizer.param_groups)
    if len(kinds_of(optimizer)) < 2 or not takes_lists:
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


@contextmanager
def explaining_shards(optimizer: Optimizer) -> Iterator[None]:
    """Explain errors of ``optimizer`` in this context that are caused by sharded parameters.

    Raises:
        RuntimeError: If an operation of the optimizer does not support shards.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # the first includes NotImplementedError
        if not _about_shards(error) or not _of_optimizer(error):
            raise
        if _has_whole_gradients(optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot step parameters whose gradients were assigned:"
                " torch.autograd.grad returns whole gradients, of this rank's batch only."
                " Call self.manual_backward(loss), which reduces and shards them."
            ) from error
        said = [*str(error).splitlines(), "DTensor does not support it"][0]
        raise RuntimeError(
            f"{type(optimizer).__name__} cannot step sharded parameters: {said.rstrip('.')}."
            " Use an elementwise optimizer (SGD, Adam, AdamW, NAdam, Adamax, Adagrad), or strategy='ddp'."
        ) from error


def _has_whole_gradients(optimizer: Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))
    return any(p.grad is not None and not isinstance(p.grad, DTensor) for p in parameters)


def _about_shards(error: BaseException) -> bool:
    if isinstance(error, AssertionError):  # torch 2.11 gives no text if an in-place result would be a DTensor
        *_, (last, _) = walk_tb(error.__traceback__)
        return last.f_globals.get("__name__", "").startswith("torch.distributed.tensor")
    return any(word in str(error) for word in _ABOUT_SHARDS)


def _of_optimizer(error: BaseException) -> bool:
    """Return whether the error was raised by the optimizer itself, not in a closure that it called."""
    inside = False
    for frame, _ in walk_tb(error.__traceback__):
        if "closure" in frame.f_code.co_name:
            inside = False
        elif frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            inside = True
    return inside
