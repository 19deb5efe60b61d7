"""Copies batches to the device before their step begins."""

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.lightning.loaders import read_ahead, why_not
from lightning_ups._compat.lightning.transfer import (
    around_transfer,
    batches_ahead,
    epoch_goes_on,
    loop_moves,
    own_hooks,
    training_iterators,
)
from lightning_ups.order import TrainerOnly, report_of
from lightning_ups.order.arguments import check_finite
from lightning_ups.transforms.prefetch import MIN_BYTES, CopiesAhead, CopyCounts, lane_for

_PART = "DevicePrefetch"
_SEEN = 3  # batches, after which it is known how they reach the device


class DevicePrefetch(Callback, TrainerOnly):
    """Copy the next batch to the GPU on a separate stream, while the current step computes.

    Hooks, loaders and random numbers run in the same order, so losses are bitwise equal, and a checkpoint does not
    count batches that were not trained on. Only the stream of the copies changes:

    - Each batch is copied at Lightning's usual place, and overlaps with the previous step if the host runs ahead.
    - If the loader has workers, the next batch is taken from them before backward, and its copy starts there: it
      overlaps even if every step waits for the GPU. Errors and the end of a loader are raised when the batch is asked
      for.

    One more batch is in GPU memory. Copies overlap only from pinned memory: ``DataLoader(pin_memory=True)``. On a CPU,
    and outside fit, the callback does nothing.

    Args:
        read_ahead: Whether to take batches from workers before backward.
        min_kb: Tensors smaller than this many KiB are copied as usual, since overlapping them costs more than the copy.

    Raises:
        ValueError: If ``min_kb`` is negative.

    Example::

        Trainer(callbacks=[DevicePrefetch()])
    """

    def __init__(self, *, read_ahead: bool = True, min_kb: float = MIN_BYTES / 2**10) -> None:
        why = "It is the size, in KiB, from which a tensor is copied on a stream of its own."
        check_finite("min_kb", min_kb, of=_PART, why=why)
        self.read_ahead, self.min_kb = read_ahead, min_kb
        self._copies: CopiesAhead | None = None
        self._undo = ExitStack()
        self._reads = read_ahead
        self._why = ""  # why no batch is read ahead
        self._batches, self._is_said = 0, False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._why, self._batches, self._is_said = "", 0, False
        device = trainer.strategy.root_device
        lane = lane_for(device)
        if device.type == "cpu" and lane is None:
            self._say(trainer, "nothing to do: training runs on the cpu")
        elif lane is None:
            self._say(trainer, f"nothing to do: it needs CUDA streams, and training runs on {device.type}")
        elif not loop_moves(trainer):
            self._say(trainer, "nothing to do: training_step takes dataloader_iter, and moves batches itself")
        else:
            self._copies = CopiesAhead(lane, min_bytes=int(self.min_kb * 2**10))
            self._undo.callback(self._copies.forget)
            self._undo.callback(around_transfer(trainer, self._copies.transfer))
            hooks = own_hooks(trainer)
            self._reads = self.read_ahead and not hooks
            if not self.read_ahead:
                self._why = "read_ahead=False"
            elif hooks:
                self._why = f"{' and '.join(hooks)} may change a batch first"

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # The host has waited for whatever forward needed, and the device still has all of backward to do.
        if self._copies is not None and self._reads:
            self._copy_next(trainer, self._copies)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._copies is not None and self._batches == _SEEN:
            self._conclude(trainer, self._copies)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._copies is not None:
            self._conclude(trainer, self._copies)
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _copy_next(self, trainer: Trainer, copies: CopiesAhead) -> None:
        loaders = training_iterators(trainer)
        whys = [why_not(loader, iterator) for loader, iterator in loaders]
        self._why = next((why for why in whys if why is not None), "")
        if waiting := batches_ahead(trainer):
            if not self._why:  # otherwise a loader may write to the batch that it returned, until the next is requested
                copies.start(waiting[0])
        elif epoch_goes_on(trainer):
            profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
            # As if Lightning asked, so that listeners count the wait for workers as a wait for data.
            with profiler.profile(f"[{_PART}].train_dataloader_next"):
                batches = [
                    read_ahead(iterator) for (_, iterator), why in zip(loaders, whys, strict=True) if why is None
                ]
            with profiler.profile(f"[{_PART}].start_copies"):
                copies.start(batches)

    # What took effect

    def _conclude(self, trainer: Trainer, copies: CopiesAhead) -> None:
        counts = copies.counts
        if not self._is_said:
            self._is_said = True
            self._say(trainer, self._line(copies), read_ahead=counts.ahead > 0, why_not=self._why or None)
            if counts.unpinned:
                rank_zero_warn(
                    f"DevicePrefetch: {counts.unpinned} tensors of the first batches are not in pinned memory."
                    " This process therefore waits while they are copied."
                    " Give the training DataLoader pin_memory=True."
                )
        report_of(trainer).update(_PART, tensors=asdict(counts))

    def _line(self, copies: CopiesAhead) -> str:
        counts = copies.counts
        if counts.ahead:
            return "batches are read ahead from workers, and copied during the previous step"
        if counts.beside:
            return f"batches are copied during the previous step if the host is ahead: {self._reason(counts)}"
        if counts.plain:
            return f"batches are copied in the order of training: their shapes change, and {self._reason(counts)}"
        return f"batches have no tensor of {self.min_kb:g} KiB or more on the host"

    def _reason(self, counts: CopyCounts) -> str:
        if self._why:
            return self._why
        if counts.unpinned:
            return "they are not in pinned memory"
        return "they are changed before they are moved" if counts.unused else "there were few"

    def _say(self, trainer: Trainer, line: str, **facts: Any) -> None:
        rank_zero_info(f"{_PART}: {line}")
        report_of(trainer).note(_PART, line, **facts)

    def _close(self) -> None:
        self._copies = None
        self._undo.close()
