"""Detects bad steps on the device, and skips them or rolls back."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.checkpoints import asked_weights_only, roll_back
from lightning_ups._compat.lightning.sharding import averaged_copies
from lightning_ups._compat.lightning.steps import after_closure, clear_skip, skip_if, skips_on_device
from lightning_ups._compat.torch.optimizers import needs_closure
from lightning_ups.order import OnlyOne, PolicyPrecision, Run, refuse_second, report_of
from lightning_ups.order.arguments import check_choice, check_finite, check_least
from lightning_ups.state.guard import Deferred, KeptBuffers, LossWatch, Saved, Verdict, layout_of
from lightning_ups.transforms.clip import gradients_of, total_norm

Action = Literal["ignore", "warn", "skip", "rollback", "stop"]
Where = Literal["auto", "device", "host"]

_LATE = 8  # steps, on a GPU: the host is rarely further ahead


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A bad step.

    Args:
        step: The optimizer step, as Lightning counts it.
        epoch: The epoch.
        batch: The index of the step's last batch in the epoch.
        kind: What went wrong.
        what: The values, in words.
        done: What was done about it.
    """

    step: int
    epoch: int
    batch: int
    kind: Literal["nonfinite", "spike"]
    what: str
    done: str


class StepGuard(Callback, OnlyOne):
    """Detect NaN, infinity and loss spikes without waiting for the GPU, and skip such steps or roll back.

    All ranks together judge the loss and the norm of all gradients on the device, before the optimizer steps. Hooks
    that read gradients before a step still find them if it is skipped. The host reads the verdict some steps later. If
    the optimizer is one of torch's fused ones, a step is skipped on the device: parameters, moments and step count stay
    the same, bit for bit. For any other optimizer the host must read the verdict first.

    ``"rollback"`` restores weights, optimizers, schedulers and step count from the last complete checkpoint saved
    before the step, and continues with the next data.

    Args:
        on_nonfinite: What to do about a step with NaN or infinity: ``"ignore"``, ``"warn"``, ``"skip"``,
            ``"rollback"``, or ``"stop"`` the run.
        on_spike: What to do about a step whose loss or norm is far above the recent ones.
        gradients: Also watch the norm of the gradients, which reads them all once more.
        skip_on: ``"device"``, ``"host"``, or ``"auto"``: the device if the optimizer supports it.
        window: The number of recent steps that a spike is compared with.
        sigmas: A spike is this many standard deviations above their mean.
        warmup_steps: The first steps, in which nothing counts as a spike.
        max_in_a_row: The run ends with an error after this many bad steps in a row.
        max_rollbacks: The run ends with an error after this many rollbacks.

    Attributes:
        events: The bad steps of this fit.

    Raises:
        ValueError: If a choice is unknown, or if this run does not support it.
        RuntimeError: If StepGuard ends the run.

    Example::

        Trainer(callbacks=[StepGuard(on_nonfinite="skip", on_spike="rollback")])
    """

    def __init__(
        self,
        *,
        on_nonfinite: Action = "skip",
        on_spike: Action = "warn",
        gradients: bool = True,
        skip_on: Where = "auto",
        window: int = 128,
        sigmas: float = 6.0,
        warmup_steps: int = 32,
        max_in_a_row: int = 10,
        max_rollbacks: int = 3,
    ) -> None:
        what = "It decides what to do about a bad step, and where."
        for name, value, known in (
            ("on_nonfinite", on_nonfinite, get_args(Action)),
            ("on_spike", on_spike, get_args(Action)),
            ("skip_on", skip_on, get_args(Where)),
        ):
            check_choice(name, value, known, of="StepGuard", why=what)
        for name, value, least, why in (
            ("window", window, 2, "It counts the steps against which a spike is measured."),
            ("warmup_steps", warmup_steps, 0, "It counts steps."),
            ("max_in_a_row", max_in_a_row, 1, "It counts bad steps."),
            ("max_rollbacks", max_rollbacks, 0, "It counts roll-backs."),
        ):
            check_least(name, value, least, of="StepGuard", why=why)
        check_finite("sigmas", sigmas, of="StepGuard", why="It counts deviations.", above=0)
        self.on_nonfinite: Action = on_nonfinite
        self.on_spike: Action = on_spike
        self.gradients, self.skip_on = gradients, skip_on
        self.window, self.sigmas, self.warmup_steps = window, float(sigmas), warmup_steps
        self.max_in_a_row, self.max_rollbacks = max_in_a_row, max_rollbacks
        self.events: list[GuardEvent] = []
        self._undo = ExitStack()
        self._weights_only: list[bool | None] = []  # the argument of fit

    # Hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_second(Run.of(trainer))
        if stage == "fit":
            self._undo.close()
            self._weights_only = self._undo.enter_context(asked_weights_only(trainer))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo.close()
        self._check(trainer)
        device = trainer.strategy.root_device
        self.events = []
        self._watch = LossWatch(device, window=self.window, sigmas=self.sigmas, least=self.warmup_steps)
        self._verdicts = Deferred(late=_LATE if device.type == "cuda" else 0)
        self._loss = torch.zeros((), device=device, dtype=_dtype_of(pl_module))
        self._in_a_row = self._rollbacks = 0
        self._on_device = self.skip_on != "host" and all(map(skips_on_device, trainer.optimizers))
        self._buffers = KeptBuffers(pl_module) if "skip" in (self.on_nonfinite, self.on_spike) else None
        self._begins = True  # the next batch is the first of a step
        self._has_loss = False  # since the last step
        self._leaves_out = False  # the host decided to skip the next step
        if self._buffers is not None and not self._on_device:
            self._undo.enter_context(after_closure(trainer.precision_plugin, self._leave_out))
        self._keeps_gradients = is_overridden("optimizer_zero_grad", pl_module)  # possibly
        self._saved = Saved()
        for optimizer in trainer.optimizers:
            self._undo.callback(clear_skip, optimizer)  # a run may end in the middle of a step
        if "rollback" in (self.on_nonfinite, self.on_spike):
            self._follow_saves(trainer)
        self._say_how(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._buffers is not None and self._begins:
            self._buffers.keep()
        self._begins = False

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._has_loss and not self._keeps_gradients:  # the gradients of earlier batches were dropped without a step
            self._loss, self._has_loss = torch.zeros_like(self._loss), False

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()  # of each microbatch, divided by their number; of the wider dtype
        self._has_loss = True

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._begins = True
        if not self._has_loss:
            return  # training_step skipped all batches by returning None, which would count as a loss of zero
        self._has_loss = False
        verdict = self._watch.judge(self._measured(optimizer))
        self._loss = torch.zeros_like(self._loss)
        if skipped := [
            verdict[index] for index, action in enumerate((self.on_nonfinite, self.on_spike)) if action == "skip"
        ]:
            flag = torch.stack(skipped).amax()
            if self._on_device:
                skip_if(optimizer, flag.float())
            else:
                self._leaves_out = bool(flag.item())  # the cost of optimizers that support no flag
            assert self._buffers is not None
            self._buffers.take_back(flag)
        place = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx)
        self._verdicts.push(verdict, place)

    def _leave_out(self, optimizer: Optimizer) -> None:
        # Only after all hooks have run, which do not expect missing gradients.
        if self._leaves_out:
            optimizer.zero_grad(set_to_none=True)  # an optimizer changes nothing without gradients
        self._leaves_out = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._on_device:
            for optimizer in trainer.optimizers:
                clear_skip(optimizer)
        for values, place in self._verdicts.due():
            if self._act(trainer, Verdict.of(values), *place):
                break  # the steps after it are undone, and so are their verdicts

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for values, place in self._verdicts.rest():
            if self._act(trainer, Verdict.of(values), *place):
                break
        self._undo.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._undo.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()

    # Verdicts

    def _measured(self, optimizer: Optimizer) -> Tensor:
        norm = torch.zeros_like(self._loss)
        if self.gradients:
            own: Any = getattr(optimizer, "gradients", None)
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            gradients: Iterable[Tensor] = own() if own is not None else gradients_of(parameters)
            norm = total_norm(gradients).to(norm.device, norm.dtype)
        values = torch.stack([self._loss, norm])
        if dist.is_available() and dist.is_initialized() and (size := dist.get_world_size()) > 1:
            dist.all_reduce(values)  # NaN on one rank is NaN on all; the host does not wait for it
            values = values / size
        return values

    def _act(self, trainer: Trainer, verdict: Verdict, step: int, epoch: int, batch: int) -> bool:
        """Act on a step; return whether the run rolled back."""
        if not verdict.nonfinite and not verdict.spike:
            self._in_a_row = 0
            return False
        kind: Literal["nonfinite", "spike"] = "nonfinite" if verdict.nonfinite else "spike"
        action = self.on_nonfinite if verdict.nonfinite else self.on_spike
        if action == "ignore":
            return False
        self._in_a_row += 1
        where = f"Step {step} (epoch {epoch}, batch {batch}): {verdict}"
        if action == "stop":
            raise RuntimeError(
                f"{where}. StepGuard is set to stop the run."
                " Check that batch and the learning rate, and resume from the last checkpoint before it."
            )
        if self._in_a_row > self.max_in_a_row:
            raise RuntimeError(
                f"{where}. These are {self._in_a_row} bad steps in a row, and StepGuard allows {self.max_in_a_row}."
                " The run will probably not recover."
                " Lower the learning rate, check the data, or resume from an earlier checkpoint."
            )
        done = {"warn": "nothing was done", "skip": "the step was skipped"}.get(action) or self._go_back(
            trainer, step, where
        )
        self._note(trainer, GuardEvent(step, epoch, batch, kind, str(verdict), done))
        rank_zero_info(f"{where}; {done}.")
        return action == "rollback"

    def _note(self, trainer: Trainer, event: GuardEvent) -> None:
        self.events.append(event)
        report_of(trainer).update("StepGuard", events=[asdict(each) for each in self.events[-100:]])
        if trainer.is_global_zero:
            number = float(sum(each.kind == event.kind for each in self.events))
            for logger in trainer.loggers:
                logger.log_metrics({f"guard/{event.kind}": number}, step=event.step)

    # Rolling back

    def _go_back(self, trainer: Trainer, step: int, where: str) -> str:
        self._rollbacks += 1
        if self._rollbacks > self.max_rollbacks:
            raise RuntimeError(
                f"{where}. The run has already rolled back {self.max_rollbacks} times, and StepGuard allows no more."
                " The cause is not a single part of the data."
                " Lower the learning rate, or check the model; the last checkpoints are unchanged."
            )
        strategy: Any = trainer.strategy
        checkpoints = getattr(strategy, "checkpoints", None)
        if checkpoints is not None:
            checkpoints.saver.wait()  # one may be on its way in the background
        found = {"step": step, "layout": layout_of(trainer.optimizers)}
        path, others = strategy.broadcast((self._saved.newest(**found), self._saved.others(**found)))
        if path is None and others:
            raise RuntimeError(
                f"{where}. The optimizer state in all complete checkpoints from before that step, such as {others[-1]},"
                " has other parameter groups than the optimizer has now."
                " They were saved before a callback such as BaseFinetuning added groups, and cannot be loaded."
                " Save just after parameters are unfrozen (ModelCheckpoint(every_n_train_steps=...)), or use 'skip'."
            )
        if path is None:
            raise RuntimeError(
                f"{where}. There is no complete checkpoint from before that step to roll back to."
                " Checkpoints with only weights do not count, and neither do deleted ones."
                " Save more often (ModelCheckpoint(every_n_train_steps=...)), or use 'skip'."
            )
        with getattr(checkpoints, "keeping_place", nullcontext)():
            roll_back(trainer, path, weights_only=self._restricts(trainer, path))
        if isinstance(strategy.precision_plugin, PolicyPrecision):
            strategy.precision_plugin.after_restore(trainer.lightning_module)
        self._verdicts.forget()
        self._loss = torch.zeros_like(self._loss)
        return (
            f"weights, optimizers and schedulers were restored to step {trainer.global_step}, from {path}"
            f" ({self._rollbacks} of {self.max_rollbacks} times); the data are not rewound{self._undone(step)}"
        )

    def _restricts(self, trainer: Trainer, path: Path) -> bool | None:
        """Return ``weights_only`` for ``path``: as given to ``fit``, or False for files that this run has written."""
        asked = self._weights_only[0] if self._weights_only else None
        return asked if str(path) == str(trainer.ckpt_path) else bool(asked)

    def _undone(self, step: int) -> str:
        """Forget checkpoints saved after ``step``, which was bad, and return a text that lists them."""
        undone = self._saved.undo(step=step)
        return f"; saved since, and containing the bad step: {', '.join(map(str, undone))}" if undone else ""

    def _follow_saves(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        if trainer.ckpt_path:
            layout = layout_of(trainer.optimizers)
            self._saved.add(Path(trainer.ckpt_path), step=trainer.global_step, layout=layout)
        stock: Callable[..., None] = strategy.save_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
            step, whole = checkpoint["global_step"], "optimizer_states" in checkpoint
            stock(checkpoint, filepath, *args, **kwargs)
            self._saved.forget(Path(filepath))  # another checkpoint may have had this name
            if whole:
                self._saved.add(Path(filepath), step=step, layout=layout_of(trainer.optimizers))

        strategy.save_checkpoint = save_checkpoint
        self._undo.callback(vars(strategy).pop, "save_checkpoint", None)

    # Errors

    def _check(self, trainer: Trainer) -> None:
        module, asked = trainer.lightning_module, {self.on_nonfinite, self.on_spike}
        if not module.automatic_optimization:
            raise ValueError(
                f"StepGuard cannot guard {type(module).__name__}, which optimizes manually."
                " StepGuard cannot know which losses and optimizer steps belong together."
                " Leave StepGuard out, or let Lightning optimize (automatic_optimization=True)."
            )
        if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
            raise ValueError(
                "StepGuard is used with precision='16-mixed'."
                " Its gradient scaler produces overflows deliberately, and skips such steps itself."
                " Use bfloat16 (precision='bf16-mixed' or BF16Precision), or leave StepGuard out."
            )
        unable = [type(optimizer).__name__ for optimizer in trainer.optimizers if not skips_on_device(optimizer)]
        if "skip" in asked and self.skip_on == "device" and unable:
            raise ValueError(
                f"StepGuard(skip_on='device') cannot skip steps of {', '.join(unable)}."
                " Only torch's fused optimizers read a flag on the device."
                " Use fused=True in the optimizer, or skip_on='auto', which waits for the GPU in every step instead."
            )
        if "skip" in asked and (several := [type(o).__name__ for o in trainer.optimizers if needs_closure(o)]):
            raise ValueError(
                f"StepGuard cannot skip steps of {', '.join(several)}."
                " It computes the loss several times in one step, and may already have changed the weights."
                " Use on_nonfinite='stop' and on_spike='warn', or 'rollback', which need not undo a part of a step."
            )
        if "rollback" not in asked:
            return
        if not trainer.checkpoint_callbacks and not trainer.ckpt_path:
            raise ValueError(
                "StepGuard may roll back to a checkpoint, but this run saves none."
                " There is no checkpoint callback, and the run does not start from one."
                " Add ModelCheckpoint(every_n_train_steps=...), or use 'skip'."
            )
        saving: Iterable[Any] = trainer.checkpoint_callbacks
        if not trainer.ckpt_path and all(getattr(each, "save_weights_only", False) for each in saving):
            raise ValueError(
                "StepGuard may roll back to a checkpoint, but this run only saves weights."
                " A rollback also needs the state of optimizers and schedulers."
                " Use ModelCheckpoint(save_weights_only=False), or 'skip'."
            )
        if averaged_copies(trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "StepGuard may roll back to a checkpoint, but a callback averages weights."
                " A rollback does not restore callbacks, so the average would keep the bad steps."
                " Use on_nonfinite='skip' and on_spike='skip', which change no average."
            )

    def _say_how(self, trainer: Trainer) -> None:
        skips = "skip" in (self.on_nonfinite, self.on_spike)
        how = (
            (", on the device" if self._on_device else ", by the host, which synchronizes in every step")
            if skips
            else ""
        )
        line = f"nonfinite: {self.on_nonfinite}, spike: {self.on_spike}{how}"
        report_of(trainer).note("StepGuard", line, on_device=self._on_device if skips else None, events=[])
        on_cpu = trainer.strategy.root_device.type == "cpu"  # where the host does not wait
        if skips and not self._on_device and not on_cpu and self.skip_on == "auto":
            rank_zero_info(f"StepGuard: {line}. A fused optimizer (fused=True) would not make it wait.")


def _dtype_of(module: LightningModule) -> torch.dtype:
    """Return the minimum dtype for the verdict, the same on every rank, whatever dtype its gradients have."""
    return torch.float64 if any(p.dtype is torch.float64 for p in module.parameters()) else torch.float32
