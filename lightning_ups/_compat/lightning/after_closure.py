"""The first and the last moment between a backward and a step: Lightning has no hooks for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from lightning_ups._compat.patches import applied

__all__ = ["after_closure", "before_hooks_of_a_step"]

_TARGET = "lightning.pytorch.plugins.precision:Precision._after_closure"


def after_closure(precision: Any, do: Callable[[Optimizer], None]) -> AbstractContextManager[None]:
    """Call ``do`` in the context as the last thing before a step, when all hooks and clipping have seen the gradients.

    A step hook of the optimizer comes too early for this: it is called before the closure that computes them.

    Args:
        precision: The precision plugin of a Trainer whose module does not optimize by itself.
        do: Is given the optimizer, which steps next.
    """

    def ending(stock: Callable[..., None]) -> Callable[..., None]:
        def closed(model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            stock(model, optimizer, *args, **kwargs)
            do(optimizer)

        return closed

    return applied(_TARGET, ending, owner=precision)


def before_hooks_of_a_step(precision: Any, do: Callable[[Any, Optimizer], None]) -> AbstractContextManager[None]:
    """Call ``do`` in the context when a backward has left gradients that nobody has changed yet.

    Args:
        precision: The precision plugin of a Trainer.
        do: Is given the module, and the optimizer, which steps next.
    """

    def beginning(stock: Callable[..., None]) -> Callable[..., None]:
        def closed(model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            do(model, optimizer)
            stock(model, optimizer, *args, **kwargs)

        return closed

    return applied(_TARGET, beginning, owner=precision)
