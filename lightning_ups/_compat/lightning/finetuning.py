"""Lightning's way of telling which parameters an optimizer has, where some are sharded and some are whole."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_ups._compat.patches import applied

__all__ = ["finetuning_by_identity", "regroup", "regroups"]


@contextmanager
def finetuning_by_identity() -> Iterator[None]:
    """Let callbacks that unfreeze parameters look, while the context is open, for these and not for equal ones.

    Lightning compares values, which fails where one is sharded and the other whole, and on shards may differ from rank
    to rank: an empty part equals every other.
    """
    with applied("lightning.pytorch.callbacks:BaseFinetuning.filter_on_optimizer", lambda _: _not_held, once=True):
        yield


def regroups(trainer: Any) -> bool:
    """Return whether a callback of ``trainer`` may have given optimizers more groups than they were made with."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)


def regroup(trainer: Any) -> None:
    """Give optimizers the groups that they had when the state of such callbacks was saved.

    Lightning does so in `on_fit_start`, which comes before a strategy that restores after its setup.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def _not_held(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in held]
