"""Gives rows of metrics to the loggers when the GPU has computed them, so that the host does not wait."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_ups._compat.lightning.fit_loop import logged_step
from lightning_ups._compat.lightning.loggers import connector, is_row_of_step, remember, to_scalar
from lightning_ups.insight.late_values import LateValues, comes_late
from lightning_ups.transforms.patching import instead_of

_MOST = 8  # maximum number of waiting rows; then the host waits for the oldest
_PATIENCE_S = 10.0  # for a device that may not respond, since the run has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """The metrics logged at one step, with the state of the trainer at that time."""

    metrics: Mapping[str, Any]
    late: LateValues
    step: int
    epoch: int
    loggers: Sequence[Any]  # those that the trainer had


class LateLogs(AbstractContextManager["LateLogs"]):
    """Give rows of training steps to the loggers of ``trainer`` late, while the context is open.

    Rows keep their step, epoch, loggers and order: anything else that is logged, such as a validation, waits until they
    are written, and so does a checkpoint.

    Only the thread that opened the context hands rows over and waits for them, since a logger may belong to it; rows of
    other threads go straight to the logger. An error of a logger, or of the device, is raised once, and drops the
    waiting rows. If the run is already ending with an error, it becomes a warning, so that it does not hide that error.

    Args:
        trainer: The Trainer whose rows are delayed.
        on_row: Called when a row begins to wait.
    """

    def __init__(self, trainer: Trainer, *, on_row: Callable[[], None] = lambda: None) -> None:
        self._trainer, self._on_row = trainer, on_row
        self._rows: deque[_Row] = deque()
        self._known = list[Any]()  # loggers that wait for rows before they log anything else
        self._undo = ExitStack()
        self._thread: int | None = None
        self._handing_over = False

    @override
    def __enter__(self) -> "LateLogs":
        self._thread = threading.get_ident()
        loop = connector(self._trainer)
        stock = loop.log_metrics

        def log_metrics(metrics: Mapping[str, Any], step: int | None = None) -> None:
            if step is not None or not self._take(metrics):
                self.flush()
                stock(metrics, step)

        self._undo.enter_context(instead_of(loop, "log_metrics", log_metrics))
        self._flush_before(self._trainer, "save_checkpoint")
        self._loggers()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        try:
            self._hand_over_rows(run_ends=True)
        finally:
            self._rows.clear()
            self._known.clear()
            self._undo.close()

    @property
    def is_waiting(self) -> bool:
        """Whether there are rows to hand over."""
        return bool(self._rows)

    def look(self) -> None:
        """Hand over the rows that have arrived, without waiting."""
        self._hand_over_rows(only_arrived=True)

    def flush(self) -> None:
        """Hand over all rows, waiting for them."""
        self._hand_over_rows()

    def _loggers(self) -> list[Any]:
        """Return the loggers that the trainer has now, which may have changed."""
        loggers: list[Any] = [*self._trainer.loggers]
        for logger in loggers:
            if not any(logger is known for known in self._known):
                self._known.append(logger)
                self._flush_before(logger, "log_metrics")
        return loggers

    def _flush_before(self, owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def after_the_rows(*args: Any, **kwargs: Any) -> Any:
            self.flush()
            return stock(*args, **kwargs)

        self._undo.enter_context(instead_of(owner, name, after_the_rows))

    def _take(self, metrics: Mapping[str, Any]) -> bool:
        """Keep the row for later, if it is of a training step and must wait for the device or for another row."""
        late = {name: value for name, value in metrics.items() if comes_late(value)}
        is_row = is_row_of_step(self._trainer) and threading.get_ident() == self._thread
        if not is_row or not self._trainer.loggers or not (late or (metrics and self._rows)):
            return False
        remember(self._trainer, metrics)
        here = {name: to_scalar(value) for name, value in metrics.items() if name not in late}
        self._rows.append(
            _Row(
                metrics={name: here.get(name) for name in metrics},
                late=LateValues(late),
                step=logged_step(self._trainer),
                epoch=self._trainer.current_epoch,
                loggers=self._loggers(),
            )
        )
        self._on_row()
        self._hand_over_rows(all_but=_MOST)
        return True

    def _hand_over_rows(self, *, all_but: int = 0, only_arrived: bool = False, run_ends: bool = False) -> None:
        run_ends = run_ends or self._trainer.interrupted  # set before any `on_exception` runs
        while len(self._rows) > all_but and threading.get_ident() == self._thread and not self._handing_over:
            lost = len(self._rows)
            try:
                if only_arrived and not self._rows[0].late.arrived():
                    return
                self._hand_over(patience_s=_PATIENCE_S if run_ends else None)
            except Exception as problem:
                self._rows.clear()
                if run_ends or lost > 1:
                    _say_lost(lost, problem)
                if not run_ends:
                    raise

    def _hand_over(self, *, patience_s: float | None) -> None:
        numbers = self._rows[0].late.read(patience_s=patience_s)  # a Ctrl-C during this wait loses no row
        row = self._rows.popleft()
        metrics, step = {**row.metrics, **numbers}, row.step
        if (own_step := metrics.pop("step", None)) is not None:  # as Lightning does
            step = int(own_step)
        else:
            metrics.setdefault("epoch", row.epoch)
        self._handing_over = True
        try:
            for logger in row.loggers:
                logger.log_metrics(metrics=metrics, step=step)
                logger.save()
        finally:
            self._handing_over = False


def _say_lost(rows: int, problem: Exception) -> None:
    (why, *_) = [*str(problem).strip().splitlines(), type(problem).__name__]
    text = (
        f"The loggers did not get the last rows of {rows} logged steps: {why.rstrip('.')}."
        " The run ended before the GPU had computed them, or a logger failed."
        " Set AccelerationFlags(late_logs=False) to log each row before the next step, which synchronizes."
    )
    try:
        rank_zero_warn(text)
    except UserWarning:  # where warnings are errors, this one would hide an error
        rank_zero_info(text)
