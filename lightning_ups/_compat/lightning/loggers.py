"""What Lightning logs, and what logging costs a step.

`LightningModule.log` makes a tensor of each number by ``torch.tensor(3.0, device=...)``, a copy for which the host
waits until the GPU has done all that it was given; `LearningRateMonitor` does so, too. Each call of ``log`` walks
through the value's record to bring it to a device, which takes a fifth of what a Trainer costs the host in a step. And
a Trainer without a profiler enters a generator's context around each hook, some forty times in a step: another fifth.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.patches import applied

__all__ = [
    "connector",
    "is_row_of_step",
    "logged_hyperparameters",
    "moved_if_elsewhere",
    "not_profiled",
    "remember",
    "to_scalar",
    "without_waiting",
]

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


def moved_if_elsewhere() -> AbstractContextManager[None]:
    """Leave a record in the context where it is, if all of it is on the device already."""
    target = "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.to"
    return applied(target, _moving, once=True)


def _moving(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to(self: _ResultMetric, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.is_tensor and _is_on(self, args[0]):
            return self
        return stock(self, *args, **kwargs)

    return to


def _is_on(metric: _ResultMetric, device: Any) -> bool:
    if type(device) is not torch.device:
        return False
    # The one container among them that holds tensors has what a reset begins from.
    held = [*vars(metric).values(), *metric._defaults.values()]
    return all(value.device == device for value in held if isinstance(value, Tensor))


def connector(trainer: Any) -> Any:
    """Return the object by whose ``log_metrics(metrics, step=None)`` every loop logs."""
    return trainer._logger_connector


def is_row_of_step(trainer: Any) -> bool:
    """Return whether what a loop logs now is of one step of training, and not of an epoch or of an evaluation."""
    return bool(trainer.training) and trainer._logger_connector._first_loop_iter is not None


def remember(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """Let ``trainer.logged_metrics`` have ``metrics``, as it has what is logged."""
    trainer._logger_connector._logged_metrics.update(metrics)


def to_scalar(value: Any) -> Any:
    """Return a tensor's number as loggers get it, and what is none as it is.

    Raises:
        ValueError: If a tensor has several.
    """
    return convert_tensors_to_scalars(value)


def logged_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning hands to the loggers when a fit starts: the module's, and the datamodule's over them."""
    found: dict[str, Any] = {}
    for holder in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if holder is not None and holder._log_hyperparams:
            found |= holder.hparams_initial
    found.pop("_class_path", None)  # of LightningCLI's own
    return found


_NOTHING = nullcontext[Any]()


@contextmanager
def not_profiled(trainer: Trainer) -> Iterator[None]:
    """Enter no context for the profiler of ``trainer`` while this one is open, if it times nothing."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is not PassThroughProfiler:
        yield
        return
    target = "lightning.pytorch.profilers:PassThroughProfiler.profile"
    with applied(target, lambda _: lambda *_, **__: _NOTHING, owner=profiler):
        yield
