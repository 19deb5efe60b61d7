"""Stand-ins for the Trainer, its optimizers and its loggers: a step may use them, and nothing of the run changes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["StandInOptimizer", "StandInTrainer", "replace_methods"]

_NO_OPS = ("log", "log_dict", "print", "clip_gradients")
_DEFAULTS: dict[str, Any] = {
    "accumulate_grad_batches": 1, "barebones": False, "current_epoch": 0, "datamodule": None,
    "estimated_stepping_batches": 1000, "fast_dev_run": False, "global_rank": 0, "global_step": 0,
    "gradient_clip_val": None, "is_global_zero": True, "is_last_batch": False, "local_rank": 0,
    "log_every_n_steps": 50, "logger": None, "loggers": [], "max_epochs": 1, "max_steps": 1000,
    "num_training_batches": 1000, "sanity_checking": False, "testing": False, "training": True,
    "validating": False,
}  # fmt: skip


class StandInTrainer:
    """Has copies of the attributes of a real Trainer, or, without one, the attributes of a described run.

    Args:
        trainer: The Trainer of the module. None: there is none.
        copy: Copies an attribute of it.
        **values: Attributes with other values.
    """

    def __init__(self, trainer: Any, copy: Callable[[Any, str], Any], **values: Any) -> None:
        self.optimizers: list[Any] = []
        loggers = [_StandInLogger(logger) for logger in trainer.loggers] if trainer is not None else []
        own = {"loggers": loggers, "logger": loggers[0] if loggers else None} if loggers else {}
        vars(self).update({**({} if trainer is not None else _DEFAULTS), **own, **values}, _trainer=trainer, _copy=copy)

    def __getattr__(self, name: str) -> Any:
        if (trainer := vars(self).get("_trainer")) is None or name.startswith("__"):
            raise AttributeError(f"the stand-in for the Trainer in a dry run has no attribute {name!r}")
        return self._copy(getattr(trainer, name), f"self.trainer.{name}")


def replace_methods(
    module: LightningModule, *, optimizers: Sequence[Any], schedulers: int, backward: Callable[..., None]
) -> None:
    """Replace the methods of a copied module that act on its Trainer.

    Args:
        module: The copy.
        optimizers: Returned by ``self.optimizers()``.
        schedulers: How many learning-rate schedulers ``self.lr_schedulers()`` returns.
        backward: Called by ``self.manual_backward``.
    """
    vars(module).update(
        dict.fromkeys(_NO_OPS, _do_nothing),
        manual_backward=backward,
        optimizers=lambda *_, **__: _one_or_all(optimizers),
        lr_schedulers=lambda: _one_or_all([StandInOptimizer() for _ in range(schedulers)]) or None,
        all_gather=lambda data, *_, **__: data,
    )


def _one_or_all(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else [*items]


def _do_nothing(*_: Any, **__: Any) -> None: ...


class StandInOptimizer:
    """Has every method of an optimizer and of a scheduler; each calls the closure if there is one, and does no more."""

    param_groups: tuple[dict[str, Any], ...] = ({"lr": 0.0, "params": ()},)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._call

    def toggle_model(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()

    sync_gradients = toggle_model

    @staticmethod
    def _call(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return closure() if callable(closure) else None


class _StandInLogger:
    """Has every attribute of a logger and of its experiment, and writes nothing."""

    _READ = ("log_dir", "name", "root_dir", "save_dir", "version")

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name) if self._logger is not None and name in self._READ else _StandInLogger()

    def __call__(self, *_: Any, **__: Any) -> "_StandInLogger":
        return _StandInLogger()

    __getitem__ = __enter__ = __call__

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __exit__(self, *_: object) -> None: ...
