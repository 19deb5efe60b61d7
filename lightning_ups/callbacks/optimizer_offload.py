"""Offloads optimizer state to the host."""

from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.steps import was_skipped
from lightning_ups.optim import OffloadedOptimizer, TorchAOOffloaded, Update, go_by_the_name_of
from lightning_ups.order import Context, Declaration, Report, Stage
from lightning_ups.order.arguments import (
    OnNoEffect,
    check_choice,
    check_finite,
    check_on_no_effect,
    raise_or_warn,
)

_PART = "OptimizerOffload"
_CHUNK_MB = 256.0


class OptimizerOffload(Declaration):
    """Keep the state of every optimizer in pinned host memory, and copy it to the device one chunk at a time.

    The module's ``configure_optimizers`` does not change. Master weights of `BF16Precision` are state too: only the
    weights in which the module computes, and their gradients, stay on the device. Values do not change, bit for bit.
    Checkpoints have the same names and values with and without this callback.

    An optimizer is accepted if, on tiny tensors, stepping in chunks gives the same result as stepping all at once.

    Args:
        update: ``"device"``: each chunk of the state is copied to the device, stepped there and copied back, while the
            next is on its way. ``"host"``: the CPU makes the step; gradients are copied down and parameters up.
            ``"torchao"``: its CPUOffloadOptimizer, on one GPU, without clipping and masters; other runs are refused.
        chunk_mb: The maximum state of a chunk, in MiB; three chunks are on the device. A larger parameter is stepped in
            parts, if its optimizer is elementwise. None: 256. Not available for ``"torchao"``, which has no chunks.
        resident: For ``"device"``: the share of the state, from 0 to less than 1, that stays on the device and needs no
            transfer.
        on_no_effect: If nothing was offloaded in the first step, ``"raise"`` an error, or ``"warn"`` and go on.

    Raises:
        ValueError: If an argument is out of its range; when fitting starts, if an optimizer is not accepted, or if the
            parameters are already on the host.
        RuntimeError: If nothing was offloaded in the first step, and ``on_no_effect="raise"``.

    Example::

        Trainer(callbacks=[OptimizerOffload(resident=0.25)])
    """

    stage = Stage.OPTIMIZERS
    owns_optimizer_state = True

    def __init__(
        self,
        *,
        update: Update | Literal["torchao"] = "device",
        chunk_mb: float | None = None,
        resident: float = 0.0,
        on_no_effect: OnNoEffect = "raise",
    ) -> None:
        why = "It says where an optimizer with offloaded state makes its steps."
        check_choice("update", update, (*get_args(Update), "torchao"), of=_PART, why=why)
        size, share = "It is the size of a chunk, in MiB.", "It is the share of the state that stays."
        check_finite("chunk_mb", chunk_mb, of=_PART, why=size, above=0, optional=True)
        check_finite("resident", resident, of=_PART, why=share)
        if update == "torchao" and (resident or chunk_mb is not None):
            raise ValueError(
                "OptimizerOffload(update='torchao') takes neither resident nor chunk_mb: torchao's CPUOffloadOptimizer"
                " keeps the whole state on the host and has no chunks. Leave them out, or use update='device'."
            )
        chunk_mb = _CHUNK_MB if chunk_mb is None else chunk_mb
        OffloadedOptimizer.check(
            update="host" if update == "torchao" else update, chunk_bytes=int(chunk_mb * 2**20), resident=resident
        )
        self.update: Update | Literal["torchao"] = update
        self._clips = False
        self.chunk_mb, self.resident = chunk_mb, resident
        self.on_no_effect: OnNoEffect = check_on_no_effect(on_no_effect, of=_PART)
        self._ours: list[OffloadedOptimizer | TorchAOOffloaded] = []
        self._report: Report | None = None
        self._began_at = 0  # the global step of the current batch

    @property
    def chunk_bytes(self) -> int:
        """The maximum number of bytes of a chunk that is copied to the device; 0 if none is."""
        return int(self.chunk_mb * 2**20) if self.update == "device" else 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._clips = bool(trainer.gradient_clip_val)

    @override
    def wrap(self, optimizer: Optimizer, context: Context) -> Optimizer:
        _refuse_offloaded(optimizer, context)
        ours = self._offloaded(optimizer)
        self._ours.append(ours)
        self._report = context.report
        where = {
            "device": f"on {context.device.type}, by chunks of {self.chunk_mb:g} MiB",
            "host": "on the CPU",
            "torchao": "on the CPU by torchao",
        }
        kept = f", {self.resident:.0%} of it staying" if self.resident else ""
        line = f"state of {type(ours.stepper).__name__} on the host{kept}, stepped {where[self.update]}"
        context.report.note(
            _PART,
            "nothing to do: training runs on the cpu" if context.device.type == "cpu" else line,
            update=self.update,
            resident=self.resident,
        )
        return ours

    def _offloaded(self, optimizer: Optimizer) -> OffloadedOptimizer | TorchAOOffloaded:
        if self.update == "torchao":
            return TorchAOOffloaded(optimizer, clips=self._clips)
        chunk_bytes = int(self.chunk_mb * 2**20)
        ours = OffloadedOptimizer(optimizer, update=self.update, chunk_bytes=chunk_bytes, resident=self.resident)
        go_by_the_name_of(optimizer, ours)
        return ours

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._began_at = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._report is None or was_skipped(pl_module, outputs, began_at=self._began_at):
            return
        # A step without gradients, such as for a skipped batch, creates no state; and not all optimizers step at once.
        if not any(ours.steps_made for ours in self._ours):
            return
        host = sum(ours.host_bytes for ours in self._ours)
        device = sum(ours.device_bytes for ours in self._ours)
        if host == 0 and not all(ours.steps_made for ours in self._ours):
            return
        report, self._report = self._report, None
        report.update(_PART, host_bytes=host, device_bytes=device)
        if host == 0:
            names = ", ".join(type(ours.stepper).__name__ for ours in self._ours)
            raise_or_warn(
                f"OptimizerOffload moved nothing in the first step: {names} has no state."
                " There are no master weights either, and the callback does not move parameters and gradients."
                " Leave the callback out, or use FSDP2Strategy(offload=True), which moves parameters.",
                self.on_no_effect,
            )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._report = None
        while self._ours:
            self._ours.pop().undo()


def _refuse_offloaded(optimizer: Optimizer, context: Context) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if context.device.type != "cpu" and all(p.device.type == "cpu" for p in parameters):
        raise ValueError(
            f"OptimizerOffload has nothing to move: the parameters of {type(optimizer).__name__} are on the host."
            " The strategy keeps them there, with their gradients and the state, as FSDP2Strategy(offload=True) does."
            " Use only one of them: the callback if parameters and gradients fit on the device."
        )
