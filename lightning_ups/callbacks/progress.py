"""A progress bar that does not make the GPU wait."""

import logging
import sys
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm
from typing_extensions import override

__all__ = ["LeanProgressBar"]


class LeanProgressBar(TQDMProgressBar):
    """Shows how far the run is, and what was logged, and reads the GPU only when it refreshes.

    A metric that is logged with ``prog_bar=True`` in ``training_step`` is read by Lightning at every step, whatever the
    bar's refresh rate, and each read waits until the GPU has done all its work. So log without ``prog_bar``: this bar
    shows the metrics that it is told to all the same. Where the Trainer has ``max_steps``, it counts towards that
    instead of towards the end of each epoch. What is logged to the terminal meanwhile stands above the bar.

    Args:
        refresh_rate: Steps between two updates. The Trainer's ``log_every_n_steps`` is a good choice: the loggers wait
            for the GPU then in any case.
        metrics: Names of logged metrics to show, beside those with ``prog_bar=True``.
    """

    def __init__(self, *, refresh_rate: int = 20, metrics: tuple[str, ...] = ("train_loss",)) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self.metrics = metrics
        self._redirected: ExitStack | None = None

    @override
    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        known = (logging.root, *logging.root.manager.loggerDict.values())  # some without handlers, some placeholders
        loggers: list[Any] = [logger for logger in known if any(map(_is_terminal, getattr(logger, "handlers", ())))]
        if self.is_enabled and loggers:
            self._redirected = ExitStack()
            self._redirected.enter_context(logging_redirect_tqdm(loggers))

    @override
    def on_train_end(self, *args: Any) -> None:
        super().on_train_end(*args)
        self._put_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._put_back()

    def _put_back(self) -> None:
        if self._redirected is not None:
            self._redirected.close()
            self._redirected = None

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        logged = trainer.logged_metrics
        return {name: value.item() for name in self.metrics if isinstance(value := logged.get(name), Tensor)} | shown

    @override
    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.max_steps == -1:
            super().on_train_epoch_start(trainer)
            return
        self.train_progress_bar.total = trainer.max_steps
        self.train_progress_bar.set_description("Training")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.max_steps == -1:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        bar, step = self.train_progress_bar, trainer.global_step
        due = self.is_enabled and (step % self.refresh_rate == 0 or step == trainer.max_steps)
        if due and step != bar.n:
            bar.n = step
            bar.set_postfix(self.get_metrics(trainer, pl_module))


def _is_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
