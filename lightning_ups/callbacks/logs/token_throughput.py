"""The throughput of training, where its time goes, and what to change first."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.lightning.fit_loop import leaves_no_files
from lightning_ups._compat.lightning.steps import was_skipped
from lightning_ups.callbacks.logs.measured_run import MeasuredRun
from lightning_ups.insight.report import reserve, run_folder
from lightning_ups.insight.throughput import Summary, first_change, given_peaks, text_table
from lightning_ups.order import OnlyOne, Run, refuse_second, report_of
from lightning_ups.order.arguments import check_finite, check_least
from lightning_ups.transforms.patching import instead_of


class TokenThroughput(Callback, OnlyOne):
    """Measure tokens, samples or other units per second, the split of a step, utilisation, memory and power.

    Figures go to every logger at the Trainer's ``log_every_n_steps``, to the progress bar, and into a table at the end,
    which compares them with thresholds and says what to change first. Times are device times, read some steps later
    without a synchronization. Training does not change, bit for bit. With a logger, the time of each counted step of
    rank 0 is written to ``step_times.csv`` next to the logs at the end of fit.

    Once, after ``inspect_at`` steps, a few steps are profiled: one for places where the host waits for the GPU, two for
    idle time and exposed communication. They do not count.

    Args:
        unit: ``"tokens"``, ``"samples"``, or another name together with ``count``; ``"auto"``: tokens if the batch has
            integers [batch, position], else samples, or batches if it has no tensor.
        count: A function that counts the units of a batch, or the dotted name of a tensor whose elements are counted.
        warmup_steps: Steps at the beginning that do not count: they compile, allocate and fill caches.
        inspect_at: The number of steps before profiling; None: never. Only on GPUs.
        split_every: One of so many steps is split into phases. None: every step on a CPU, every eleventh on a GPU.
        flops_per_unit: FLOPs of forward and backward for one unit. None: counted for the first batch in a dry run.
        peak_tflops: Peak TFLOP/s of one device if it is unknown: a figure, or one for each of ``"bf16"``, ``"fp8"``,
            ``"tf32"``, ``"fp32"``.
        single_device: Units per second of a single device, for the scaling efficiency.
        progress_bar: Show rate, utilisation and the wait for data in the progress bar.
        table: Print the table at the end of fit.

    Attributes:
        summary: The figures of the last fit; None before its end.

    Raises:
        ValueError: If a number is out of range, or the first batch has no such unit.

    Example::

        Trainer(callbacks=[TokenThroughput(unit="samples", inspect_at=None)])
    """

    def __init__(
        self,
        *,
        unit: str = "auto",
        count: str | Callable[[Any], Any] | None = None,
        warmup_steps: int = 10,
        inspect_at: int | None = 20,
        split_every: int | None = None,
        flops_per_unit: float | None = None,
        peak_tflops: float | Mapping[str, float] | None = None,
        single_device: float | None = None,
        progress_bar: bool = True,
        table: bool = True,
    ) -> None:
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("inspect_at", inspect_at, 1),
            ("split_every", split_every, 1),
        ):
            optional = name != "warmup_steps"
            check_least(name, value, least, of="TokenThroughput", why="It counts steps.", optional=optional)
        for name, value, why in (
            ("flops_per_unit", flops_per_unit, "It counts operations."),
            ("single_device", single_device, "It is a speed, in units per second."),
        ):
            check_finite(name, value, of="TokenThroughput", why=why, above=0, optional=True)
        if count is None and unit not in ("auto", "tokens", "samples"):
            raise ValueError(
                f"TokenThroughput(unit={unit!r}) needs count as well, unless the unit is tokens or samples:"
                " a function of the batch, or the name of a tensor in it."
            )
        given_peaks(1.0 if peak_tflops is None else peak_tflops, arithmetic="bf16")  # raises for invalid values
        self.unit, self.count, self.single_device = unit, count, single_device
        self.warmup_steps, self.inspect_at, self.split_every = warmup_steps, inspect_at, split_every
        self.flops_per_unit, self.peak_tflops = flops_per_unit, peak_tflops
        self.progress_bar, self.table = progress_bar, table
        self.summary: Summary | None = None
        self._folder = ""
        self._undo = ExitStack()
        self._run: MeasuredRun | None = None
        self._resting: MeasuredRun | None = None

    # When

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_second(Run.of(trainer))
        if stage == "fit":
            self.summary = None
            writes = trainer.loggers and not leaves_no_files(trainer)
            self._folder = run_folder(trainer) if writes else ""  # asks the other ranks: every rank has to

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_began = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        if not leaves_no_files(trainer):
            self.open(trainer)

    def open(self, trainer: Trainer) -> None:
        """Begin to measure, as fit does when training starts."""
        run = self._run = MeasuredRun(self, trainer, began=getattr(self, "_fit_began", time.perf_counter()))
        run.listen(trainer)
        self._undo.callback(run.close, trainer)
        bar = trainer.progress_bar_callback
        if self.progress_bar and bar is not None:
            stock = bar.get_metrics

            def get_metrics(*args: Any, **kwargs: Any) -> dict[str, Any]:
                return {**stock(*args, **kwargs), **run.shown}

            self._undo.enter_context(instead_of(bar, "get_metrics", get_metrics))

    def close(self) -> None:
        """Restore the Trainer, as fit does when it ends."""
        self._undo.close()
        self._run = self._resting = None

    def pause(self, trainer: Trainer) -> None:
        """Stop measuring until `resume`, between two steps."""
        if self._run is not None:
            self._run.rest(trainer)
            self._run, self._resting = None, self._run

    def resume(self, trainer: Trainer) -> None:
        """Continue after `pause`."""
        if self._resting is not None:
            self._resting.listen(trainer)
            self._run, self._resting = self._resting, None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.begin_batch(batch)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._run is not None and not pl_module.automatic_optimization:
            self._run.enter("backward")  # not reported to Lightning's profiler

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None and not pl_module.automatic_optimization:
            self._run.leave()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            left_out = pl_module.automatic_optimization and was_skipped(
                pl_module, outputs, began_at=trainer.global_step
            )
            self._run.end_batch(batch, left_out=left_out)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end_validation()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end_epoch()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conclude(trainer, alone=False)

    def _conclude(self, trainer: Trainer, *, alone: bool) -> None:
        if self._run is None:
            return
        self.summary = self._run.summary(alone=alone)
        written = self._write_step_times(self._run) if trainer.is_global_zero else None
        report_of(trainer).update("TokenThroughput", **facts(self.summary), step_times=written)
        if self.summary.units_per_s is None:
            rank_zero_info(f"TokenThroughput measured nothing: {self._run.why_nothing}.")
        elif self.table and trainer.is_global_zero:
            sys.stdout.write(text_table(self.summary))
            sys.stdout.flush()
        self.close()

    def _write_step_times(self, run: MeasuredRun) -> str | None:
        """Write the time of each counted step, and return the name of the file."""
        lines = [f"{step},{1e3 * seconds:.6g}\n" for step, seconds in run.step_times()]
        if not (lines and self._folder) or "://" in self._folder:
            return None
        try:
            path = reserve(Path(self._folder), name="step_times", ending=".csv")
            path.write_text("".join(["step,step_ms\n", *lines]), encoding="utf-8")
        except OSError as error:
            rank_zero_warn(
                f"TokenThroughput could not write step_times.csv to {self._folder}: {error}. Free space there."
            )
            return None
        return path.name

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After an error the device may not respond, and other ranks do not get here.
        if isinstance(exception, (KeyboardInterrupt, SIGTERMException)):
            self._conclude(trainer, alone=True)
        self.close()


def facts(summary: Summary) -> dict[str, Any]:
    """Return the values of ``summary`` for the manifest."""
    change = first_change(summary)
    return {
        "unit": summary.unit,
        "units_per_s": summary.units_per_s,
        "units_per_s_per_device": summary.units_per_s_per_device,
        "step_s": summary.step_s,
        "step_p95_s": summary.step_p95_s,
        "split": dict(summary.split),
        "utilisation": dict(summary.utilisation),
        "memory": dict(summary.memory),
        "gpu": dict(summary.gpu),
        "change_first": None if change is None else f"{change.name}: {change.what}",
    }
