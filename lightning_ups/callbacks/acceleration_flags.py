"""Process-wide switches that affect speed, set for one run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ups._compat.lightning.loggers import moved_if_elsewhere, not_profiled, without_waiting
from lightning_ups.callbacks.logs.late_logs import LateLogs
from lightning_ups.insight.late_values import is_far
from lightning_ups.kernels.attention import decisions, recorded_decisions
from lightning_ups.order import Context, Declaration, Report, Stage
from lightning_ups.transforms.error_hints import note_no_kernel
from lightning_ups.transforms.flags import (
    AttentionBackend,
    Flags,
    PacedCollection,
    accelerated,
    attention_is_unused,
    current_flags,
    without_effect,
)

_BATCH_ENDS = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


class AccelerationFlags(Declaration):
    """Set TF32, cuDNN, the CUDA allocator, garbage collection and the attention kernels for one run.

    The switches are set before any conversion or compilation, apply to fit, validate, test and predict, and are
    restored after the run, also after an exception. None, the default of each, leaves a switch unchanged. A setting
    without effect on the device of the run is logged once and is not an error, so one configuration serves a GPU and a
    CPU. The report shows the values that took effect.

    In addition, loggers no longer make the host wait for a GPU, unless ``late_logs`` is off, and a Trainer without a
    profiler no longer enters a context for each hook that it calls.

    Args:
        tf32: Whether float32 matrix products and convolutions may use TF32: on Ampere and later several times as
            fast, with 10 bits of mantissa instead of 23. It does nothing for bfloat16 work.
        cudnn_benchmark: Whether cuDNN tries its convolution algorithms on each new shape. Good for fixed shapes.
        attention: The kernels that ``scaled_dot_product_attention`` may use, in order of preference, such as
            ``["cudnn", "flash", "efficient", "math"]``. Others are off. Each is tried once when the run starts.
            ``"auto"`` is the kernel that was measured to be the fastest for each shape; ``["fa4", "auto"]`` uses
            FlashAttention-4 where it supports the call.
        expandable_segments: Whether the CUDA allocator uses expandable segments, which reduces fragmentation. Memory
            reserved before the run is not affected.
        max_split_size_mb: Blocks of the allocator above this size are not split; more than 20.
        garbage_collection_threshold: The share of GPU memory in use, between 0 and 1, above which the allocator
            frees cached blocks.
        gc_interval: Run Python's garbage collector every so many batches, on all ranks at the same batch, and at no
            other time. Objects that exist after the first batch are frozen.
        late_logs: Whether metrics logged at a step reach the loggers a few steps later, when the GPU has computed them,
            so that the host does not wait. Rows keep their step, epoch and order. All rows are written before anything
            else is logged, before a checkpoint, and at the end of the run, also after an exception.

    Raises:
        ValueError: If a value is out of range, or an attention kernel unknown.
        RuntimeError: When the run starts, if an attention kernel or an allocator setting is not available on the
            device.

    Example::

        Trainer(callbacks=[AccelerationFlags(tf32=True, attention=["cudnn", "flash", "math"], gc_interval=100)])
    """

    stage = Stage.CONVERT  # the first: compiled code has the attention kernel and TF32 baked in
    in_fabric = "Open the context accelerated() of lightning_ups.transforms.flags instead."

    def __init__(
        self,
        *,
        tf32: bool | None = None,
        cudnn_benchmark: bool | None = None,
        attention: Sequence[AttentionBackend] | AttentionBackend | None = None,
        expandable_segments: bool | None = None,
        max_split_size_mb: int | None = None,
        garbage_collection_threshold: float | None = None,
        gc_interval: int | None = None,
        late_logs: bool = True,
    ) -> None:
        self.flags = Flags(
            tf32=tf32,
            cudnn_benchmark=cudnn_benchmark,
            attention=[attention] if isinstance(attention, str) else attention,
            expandable_segments=expandable_segments,
            max_split_size_mb=max_split_size_mb,
            garbage_collection_threshold=garbage_collection_threshold,
            gc_interval=gc_interval,
        )
        self.late_logs = late_logs
        self._collection: PacedCollection | None = None
        self._logs: LateLogs | None = None
        self._of_run = ExitStack()
        self._report: Report | None = None
        self._chosen: Mapping[Any, dict[str, Any]] = {}
        self._told = 0  # how many of them are in the report
        self._looked = False  # whether any attention reached the kernels

    @override
    @contextmanager
    def change(self, module: LightningModule, context: Context) -> Iterator[None]:
        # Of the run that contains this one.
        before = self._collection, self._report, self._chosen, self._told, self._of_run, self._logs, self._looked
        with (
            accelerated(self.flags, device=context.device) as self._collection,
            recorded_decisions(self._wake) as self._chosen,
            moved_if_elsewhere(),
            not_profiled(module.trainer),
            ExitStack() as self._of_run,
        ):
            try:
                self._say(context)
                self._report, self._told, self._logs, self._looked = context.report, 0, None, False
                yield
            finally:
                (
                    self._collection,
                    self._report,
                    self._chosen,
                    self._told,
                    self._of_run,
                    self._logs,
                    self._looked,
                ) = before

    def _say(self, context: Context) -> None:
        name, asked = type(self).__name__, self.flags.asked
        idle = without_effect(self.flags, device=context.device)
        context.report.update(name, asked=asked, no_effect=idle, in_effect=current_flags())
        if effective := {flag: value for flag, value in asked.items() if flag not in idle or flag == "attention"}:
            context.report.note(name, ", ".join(f"{flag}={value}" for flag, value in effective.items()))
        for flag, why in idle.items():
            context.report.note(name, f"{flag}={asked[flag]}: {why}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (
            self._report is None
            or not self.late_logs
            or not trainer.loggers
            or not is_far(trainer.strategy.root_device)
        ):
            return
        self._logs = self._of_run.enter_context(LateLogs(trainer, on_row=self._wake))
        self._of_run.enter_context(without_waiting(trainer))
        line = "late_logs: metrics reach the loggers when the GPU has computed them, without a synchronization"
        self._report.note(type(self).__name__, line)
        rank_zero_info(f"{type(self).__name__}: {line}")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if (asked := self.flags.asked.get("attention")) is not None:
            note_no_kernel(exception, asked=f"{type(self).__name__}(attention={asked!r})")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_all()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_all()

    def _log_all(self) -> None:
        if self._logs is not None:
            self._logs.flush()

    def end_logs(self) -> None:
        """Give waiting rows to the loggers at the end of a run; from now on they get each row at once."""
        self._of_run.close()
        self._logs = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._after_batch(trainer, skipped=pl_module.automatic_optimization and not outputs)

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._after_batch(trainer)

    @override
    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._after_batch(trainer)

    @override
    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._after_batch(trainer)

    def _after_batch(self, trainer: Trainer, *, skipped: bool = False) -> None:
        if self._logs is not None:
            self._logs.look()
        if self._report is not None and self.flags.attention and not trainer.sanity_checking and not skipped:
            self._look_at_attention(trainer, self.flags.attention, self._report)
        if self._collection is not None and not trainer.sanity_checking:
            self._collection.after_batch()
        is_over = self._looked or not self.flags.attention or self._report is None
        if is_over and self._collection is None and not (self._logs is not None and self._logs.is_waiting):
            self.rest(*_BATCH_ENDS)

    def _wake(self) -> None:
        self.wake(*_BATCH_ENDS)

    def _look_at_attention(self, trainer: Trainer, asked: Sequence[AttentionBackend], report: Report) -> None:
        if not self._looked and attention_is_unused(asked, device=trainer.strategy.root_device):
            line = (
                f"attention={[*asked]}: no effect so far, because the first batch did not call"
                " F.scaled_dot_product_attention, or only inside sdpa_kernel. Models of transformers call it with"
                " attn_implementation='sdpa'"
            )
            report.note(type(self).__name__, line)
            rank_zero_info(f"{type(self).__name__}: {line}")
        elif "auto" in asked:
            self._tell_choices(asked, report)
        self._looked = True

    def _tell_choices(self, asked: Sequence[AttentionBackend], report: Report) -> None:
        if (self._told or self._looked) and len(self._chosen) <= self._told:
            return
        name = type(self).__name__
        chosen = [dict(choice) for choice in self._chosen.values()]
        if not chosen and [*asked] == ["auto"]:  # if kernels are named too, these may do all of it
            chosen = _chosen_before()
        for line in dict.fromkeys(map(_line, chosen[self._told :])):
            report.note(name, line)
            rank_zero_info(f"{name}: {line}")  # what the report held before was printed then
        if chosen:
            report.update(name, attention_chosen=chosen)
        self._told = len(chosen)


def _chosen_before() -> list[dict[str, Any]]:
    # Code that an earlier run of this process compiled makes no new choices: it keeps some of the earlier ones.
    return [choice | {"why": f"{choice['why']}, as chosen earlier in this process"} for choice in decisions()]


def _line(choice: Mapping[str, Any]) -> str:
    return f"attention of {choice['heads']} heads of {choice['head_dim']} by {choice['backend']}: {choice['why']}"
