"""Reduces the cost of Lightning's logging.

`LightningModule.log` converts numbers with ``torch.tensor(3.0, device=...)``, a copy for which the host waits until the
GPU has finished all queued work; `LearningRateMonitor` does the same. Each call of ``log`` walks through the value's
record to move it to a device, a fifth of the Trainer's host time per step. And a Trainer without a profiler enters a
generator context around each hook, some forty times per step: another fifth.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.patches import applied

_TO_TENSOR = "lightning.pytorch:LightningModule._LightningModule__to_tensor"
_EXACT = 2**53  # up to which float64 represents all integers


@contextmanager
def without_waiting(trainer: Trainer) -> Iterator[None]:
    """Log numbers without synchronizing while the context is open: kernels write them on the GPU."""
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
    """Lets a kernel write the number of a new tensor."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.tensor and len(args) == 1 and options.keys() <= {"device", "dtype"} and _is_exact(args[0]):
            (value,) = args
            own = torch.get_default_dtype() if type(value) is float else torch.int64
            # Via float64, so that a number that is too large for the dtype becomes infinite.
            filled = torch.full((), value, dtype=torch.float64, device=options.get("device"))
            return filled.to(options.get("dtype") or own)
        return func(*args, **options)


def _is_exact(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _EXACT)


def moved_if_elsewhere() -> AbstractContextManager[None]:
    """Do not move a record while the context is open if all of it is already on the device."""
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
    # The one container with tensors has the initial values of a reset.
    held = [*vars(metric).values(), *metric._defaults.values()]
    return all(value.device == device for value in held if isinstance(value, Tensor))


def connector(trainer: Any) -> Any:
    """Return the object whose ``log_metrics(metrics, step=None)`` every loop calls to log."""
    return trainer._logger_connector


def is_row_of_step(trainer: Any) -> bool:
    """Return whether a loop now logs a training step, and not an epoch or an evaluation."""
    return bool(trainer.training) and trainer._logger_connector._first_loop_iter is not None


def remember(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """Add ``metrics`` to ``trainer.logged_metrics``, as if they were logged."""
    trainer._logger_connector._logged_metrics.update(metrics)


def to_scalar(value: Any) -> Any:
    """Return the number in a tensor, as loggers receive it; return other values unchanged.

    Raises:
        ValueError: If a tensor has several elements.
    """
    return convert_tensors_to_scalars(value)


def logged_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return the hyperparameters that Lightning logs when a fit starts: the module's, updated by the datamodule's."""
    found: dict[str, Any] = {}
    for holder in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if holder is not None and holder._log_hyperparams:
            found |= holder.hparams_initial
    found.pop("_class_path", None)  # added by LightningCLI
    return found


_NOTHING = nullcontext[Any]()


def log_hyperparameters(logger: Logger, params: dict[str, Any]) -> None:
    """Log ``params``; in TensorBoard without the metric ``hp_metric: -1`` of Lightning, which nobody measured."""
    if type(logger) is not TensorBoardLogger:
        logger.log_hyperparams(params)
        return
    from torch.utils.tensorboard.summary import hparams  # slow to import

    logger.log_hyperparams(params, metrics={})  # for hparams.yaml alone
    writer = logger.experiment._get_file_writer()
    for summary in hparams(logger._sanitize_params(_flatten_dict(params)), {}):
        writer.add_summary(summary)


@contextmanager
def not_profiled(trainer: Trainer) -> Iterator[None]:
    """Skip the profiler contexts of ``trainer`` while this one is open, if its profiler does nothing."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is not PassThroughProfiler:
        yield
        return
    target = "lightning.pytorch.profilers:PassThroughProfiler.profile"
    with applied(target, lambda _: lambda *_, **__: _NOTHING, owner=profiler):
        yield
