"""The first and the last moment between a backward and a step: Lightning has no hooks for them."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["after_closure", "before_hooks_of_a_step"]


def after_closure(precision: Any, do: Callable[[Optimizer], None]) -> tuple[Any, str, Callable[..., None]]:
    """Return ``precision``, the name of a method of it, and one that does more: the last moment before a step.

    It calls ``do`` when everyone has seen the gradients of an optimizer, and these are clipped. A step hook of the
    optimizer comes too early for this: it is called before the closure that computes them.

    Args:
        precision: The precision plugin of a Trainer whose module does not optimize by itself.
        do: Is given the optimizer, which steps next.
    """
    stock = precision._after_closure

    def closed(model: Any, optimizer: Optimizer) -> None:
        stock(model, optimizer)
        do(optimizer)

    return precision, "_after_closure", closed


def before_hooks_of_a_step(
    precision: Any, do: Callable[[Any, Optimizer], None]
) -> tuple[Any, str, Callable[..., None]]:
    """Return the same with ``do`` called first, when a backward has left gradients that nobody has changed yet.

    Args:
        precision: The precision plugin of a Trainer.
        do: Is given the module, and the optimizer, which steps next.
    """
    stock = precision._after_closure

    def closed(model: Any, optimizer: Optimizer) -> None:
        do(model, optimizer)
        stock(model, optimizer)

    return precision, "_after_closure", closed
