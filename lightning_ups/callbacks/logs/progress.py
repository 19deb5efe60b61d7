"""A progress bar that does not make the GPU wait."""

import logging
import sys
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm
from typing_extensions import override

from lightning_ups.insight.late_values import LateValues, comes_late
from lightning_ups.order import TrainerOnly
from lightning_ups.order.arguments import check_least


class LeanProgressBar(TQDMProgressBar, TrainerOnly):
    """Show the progress of the run and logged metrics, without waiting for a GPU.

    Lightning reads a metric that is logged with ``prog_bar=True`` in ``training_step`` at every step, whatever the
    refresh rate, and each read waits until the GPU has done all its work. So log without ``prog_bar``, and name the
    metrics here. When a refresh is due, the values start their copy from the GPU, and the bar is painted at the end of
    the batch by which they have arrived; only the last refresh of a run, or of an epoch, waits for them. If the Trainer
    has ``max_steps``, the bar counts to it instead of to the end of each epoch. Log messages are printed above the bar.

    Args:
        refresh_rate: Steps between two updates.
        metrics: Names of logged metrics to show, in addition to those with ``prog_bar=True``.

    Raises:
        TypeError: If ``metrics`` is one name and not a list.
        ValueError: If ``refresh_rate`` is negative; 0 hides the bar.
    """

    def __init__(self, *, refresh_rate: int = 20, metrics: tuple[str, ...] = ("train_loss",)) -> None:
        check_least("refresh_rate", refresh_rate, 0, of="LeanProgressBar", why="It counts steps.")
        if isinstance(metrics, str):
            raise TypeError(
                f"LeanProgressBar(metrics={metrics!r}) is not a list of names."
                " It shows metrics by their logged names."
                " Write them as a list, such as ['train_loss']."
            )
        super().__init__(refresh_rate=refresh_rate)
        self.metrics = tuple(metrics)
        self._checked = False
        self._redirected: ExitStack | None = None
        self._coming: LateValues | None = None
        self._come: dict[str, Any] = {}

    @override
    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        self._coming, self._come = None, {}
        known = (logging.root, *logging.root.manager.loggerDict.values())  # some without handlers, some placeholders
        loggers: list[Any] = [logger for logger in known if any(map(_is_terminal, getattr(logger, "handlers", ())))]
        if self.is_enabled and loggers:
            self._redirected = ExitStack()
            self._redirected.enter_context(logging_redirect_tqdm(loggers))

    @override
    def on_train_end(self, *args: Any) -> None:
        trainer, pl_module = args
        if not self.train_progress_bar.disable and self._send_for(trainer):
            self._take(wait=True)
            self._paint(trainer, pl_module)
        super().on_train_end(*args)
        self._put_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._put_back()

    def _put_back(self) -> None:
        self._coming = None
        if self._redirected is not None:
            self._redirected.close()
            self._redirected = None

    # Content

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        self._take()
        here = {name: value.item() for name, value in self._logged(trainer).items() if not comes_late(value)}
        values = self._come | here
        return {name: values[name] for name in self.metrics if name in values} | shown

    def _logged(self, trainer: Trainer) -> dict[str, Tensor]:
        logged = trainer.logged_metrics
        return {name: value for name in self.metrics if isinstance(value := logged.get(name), Tensor)}

    def _send_for(self, trainer: Trainer) -> bool:
        """Start copying the current values from the GPU, if there are any."""
        if late := {name: value for name, value in self._logged(trainer).items() if comes_late(value)}:
            self._coming = LateValues(late)
        return bool(late)

    def _take(self, *, wait: bool = False) -> bool:
        """Use the copied values if they have arrived, or ``wait`` for them."""
        if self._coming is None or not (wait or self._coming.arrived()):
            return False
        self._come, self._coming = self._coming.read(), None
        return True

    def _paint(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    # Hooks

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
        bar, counts_epoch = self.train_progress_bar, trainer.max_steps == -1
        count, total = (batch_idx + 1, bar.total) if counts_epoch else (trainer.global_step, trainer.max_steps)
        to_paint = self._take()
        if self._should_update(count, total) and (counts_epoch or count != bar.n):
            bar.n = count
            is_overdue = self._coming is not None
            to_paint = to_paint or is_overdue or not self._send_for(trainer)
        if to_paint:
            self._paint(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_steps == -1 and not self.train_progress_bar.disable and self._send_for(trainer):
            self._take(wait=True)
        super().on_train_epoch_end(trainer, pl_module)
        if not self._checked:
            self._checked = True
            self._check_names([*trainer.callback_metrics])

    def _check_names(self, logged: list[str]) -> None:
        for name in self.metrics:
            if name not in logged and name != "train_loss":  # the default
                near = get_close_matches(name, logged, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Logged: {', '.join(logged) or 'nothing'}."
                rank_zero_warn(f"LeanProgressBar shows no {name!r}: it was not logged in the first epoch. {hint}")


def _is_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
