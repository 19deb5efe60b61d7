"""Python's numbers as tensors of a GPU, where Lightning logs them.

It makes them by ``torch.tensor(3.0, device=...)``: a copy out of memory that is not pinned, for which the host waits
until the GPU has done all that it was given. `LightningModule.log` does so with each plain number, and
`LearningRateMonitor` with what it puts into ``callback_metrics``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.patches import applied

__all__ = ["without_waiting"]

_TO_TENSOR = "lightning.pytorch:LightningModule._LightningModule__to_tensor"
_TO_TENSOR = "lightning.pytorch:LightningModule._LightningModule__to_tensor"
_EXACT = 2**53  # up to which float64 has all integers


@contextmanager
def without_waiting(trainer: Trainer) -> Iterator[None]:
    """Log numbers by kernels of the GPU while the context is open."""
    with ExitStack() as stack:
        stack.enter_context(applied(_TO_TENSOR, _logging, only_speed=True))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateMonitor):
                target = "lightning.pytorch.callbacks:LearningRateMonitor._extract_stats"
                stack.enter_context(applied(target, lambda stock: partial(_monitoring, stock), owner=callback))
        yield


def _logging(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to_tensor(self: LightningModule, value: Any, *rest: Any) -> Any:
        if type(value) not in (float, int):
            return stock(self, value, *rest)
        with _Filling():
            return stock(self, value, *rest)

    return to_tensor


def _monitoring(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Filling():
        return stock(*args, **kwargs)


class _Filling(TorchFunctionMode):
    """Lets a kernel write the number that a tensor is made of."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.tensor and len(args) == 1 and options.keys() <= {"device", "dtype"} and _is_exact(args[0]):
            (value,) = args
            own = torch.get_default_dtype() if type(value) is float else torch.int64
            # By way of float64, since a number that is too large for the type has to become infinite.
            filled = torch.full((), value, dtype=torch.float64, device=options.get("device"))
            return filled.to(options.get("dtype") or own)
        return func(*args, **options)


def _is_exact(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _EXACT)
