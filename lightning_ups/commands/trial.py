"""A configuration that is tried for some steps, on one device of this machine: nothing is logged or saved."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_ups._compat.contexts import only_from
from lightning_ups._compat.lightning.fit_setup import attach, first_batch
from lightning_ups.config.layers import items
from lightning_ups.config.requested_run import check_trainer, missing_gpu
from lightning_ups.order import Run, Step

# What decides the work of a step; the rest of what a Trainer takes is about where and how long.
_OF_A_STEP = (
    "accelerator",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "reload_dataloaders_every_n_epochs",
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a configuration asks for, made, and ready to be tried."""

    module: LightningModule  # built as for fit
    data: LightningDataModule | None  # None: the module brings its own
    settings: Mapping[str, Any]  # what the section ``trainer`` says, classes in it made
    callbacks: Sequence[Callback]  # of sections of their own
    run: Run  # as asked for, with all its devices
    seed: int  # with which each trial begins
    checkpoint: str | None = None  # what fit would resume from

    @property
    def precision(self) -> Precision:
        """The precision that is asked for."""
        return self.run.precision

    @property
    def declared(self) -> list[Callback]:
        """The callbacks that change the model or its optimizers; no other takes part in a trial."""
        return [callback for callback in self.run.callbacks if isinstance(callback, Step)]

    def fit(
        self,
        watch: Callback,
        *,
        steps: int,
        precision: Precision | None = None,
        plain: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """Train for ``steps`` optimizer steps from the seed, and return the Trainer.

        Args:
            watch: Sees the steps.
            steps: How many.
            precision: Replaces the one of the configuration.
            plain: Leave out what the configuration adds: its strategy and its declarations.
            state: What the module holds at the start. None: what it holds now.

        Raises:
            ValueError: If the strategy that is asked for needs more than one device.
            RuntimeError: If the run asks for a GPU and there is none.
        """
        check_trainer(self.settings, here=True)
        if not plain:
            self.check_fits_one_device()
        if state is not None:
            extra = {name: deepcopy(value) for name, value in state.items() if not isinstance(value, torch.Tensor)}
            self.module.load_state_dict({**state, **extra})  # a module may hold on to its extra state, and write to it
        seed_everything(self.seed, workers=True, verbose=False)
        with TemporaryDirectory() as folder, only_from(logging.WARNING, "lightning.pytorch"):
            trainer = self._trainer(folder, watch, steps=steps, precision=precision, plain=plain)
            trainer.fit(self.module, datamodule=self.data)
        return trainer

    def check_fits_one_device(self) -> None:
        """Refuse a strategy that cannot be tried on one device.

        Raises:
            ValueError: If it needs more.
        """
        names = ("tensor_parallel_size", "replicate_size")
        if split := {n: size for n in names if (size := self.run.strategy.settings.get(n, 1)) > 1}:
            said = ", ".join(f"{name}={size}" for name, size in split.items())
            raise ValueError(
                f"{self.run.strategy.name}({said}) cannot be tried on one device."
                " Try it without: --trainer.strategy fsdp2. For advise, --steps 0 needs no trial."
            )

    def batch(self) -> Any:
        """Return a batch as training would see it, and let the module know its Trainer, as in fit."""
        seed_everything(self.seed, workers=True, verbose=False)
        with TemporaryDirectory() as folder, only_from(logging.WARNING, "lightning.pytorch"):
            trainer = self._trainer(folder, Callback(), steps=1, precision=None, plain=True)
        attach(trainer, self.module, self.data)
        if is_overridden("configure_model", self.module):
            self.module.configure_model()
        return first_batch(trainer)

    def _trainer(
        self, folder: str, watch: Callback, *, steps: int, precision: Precision | None, plain: bool
    ) -> Trainer:
        settings = {name: self.settings[name] for name in _OF_A_STEP if self.settings.get(name) is not None}
        if missing_gpu(settings.get("accelerator")):  # only a batch is looked at
            settings["accelerator"] = "cpu"
        plugins = [plugin for plugin in items(self.settings.get("plugins")) if not plain]
        if precision is not None:
            plugins = [plugin for plugin in plugins if not isinstance(plugin, Precision)] + [precision]
        elif not plain and self.settings.get("precision") is not None:
            settings["precision"] = self.settings["precision"]
        callbacks = [*([] if plain else self.declared), _Seeded(self.seed), Patience(), watch]
        return Trainer(
            **settings,
            strategy="auto" if plain else self.settings["strategy"],
            plugins=plugins or None,
            callbacks=[Only(lambda each: isinstance(each, Step | Only) or each in callbacks), *callbacks],
            devices=1,
            use_distributed_sampler=False,  # it would shuffle in another way than a single device does
            max_steps=steps,
            logger=Nowhere(folder),
            log_every_n_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )


class Nowhere(DummyLogger):
    """Keeps nothing of what a module writes to it by itself; what goes to its folder goes with that."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @property
    @override
    def log_dir(self) -> str:
        return self._folder


class _Seeded(Callback):
    """Draws from the seed anew: a module that the first of several trials builds has drawn from it in that alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(self._seed, workers=True, verbose=False)


class Only(Callback):
    """Leaves out callbacks that a trial does not want, also those of the module's ``configure_callbacks``."""

    def __init__(self, is_wanted: Callable[[Callback], bool]) -> None:
        self._is_wanted = is_wanted

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.callbacks = [each for each in trainer.callbacks if self._is_wanted(each)]  # type: ignore[attr-defined]


class Patience(Callback):
    """Lets schedulers wait that go by what validation measures, since a trial validates nothing."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.strict:
                config.strict = False  # or else what is not measured is an error, and so it is a warning
                warnings.filterwarnings("ignore", "ReduceLROnPlateau conditioned on metric", RuntimeWarning)


class Continued(Callback):
    """Lets a run go on after its own end, with the learning rates that it has then.

    Until then, user code reads the limits of the run, and what is estimated from them.
    """

    has_ended = False  # whether the run is past its own end
    _has_batches = False  # whether this epoch has any

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._has_batches = True
        if self.has_ended or not _is_last_step(trainer):
            return
        self.has_ended = True
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step = _stay  # OneCycleLR raises an error after its last step

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.has_ended and not self._has_batches:
            trainer.should_stop = True  # a stream that can be read once is over: epochs without steps would not end
        self._has_batches = False


def endless(settings: Mapping[str, Any], *, has_timer: bool) -> bool:
    """Return whether only time limits a run, so that Lightning estimates no number of its steps."""
    has_limit = settings.get("max_epochs") is not None or (settings.get("max_steps") or -1) >= 0
    return not has_limit and (has_timer or settings.get("max_time") is not None)


def _is_last_step(trainer: Trainer) -> bool:
    epochs = trainer.current_epoch + bool(trainer.is_last_batch)
    return 0 <= trainer.max_steps <= trainer.global_step or 0 <= (trainer.max_epochs or 0) <= epochs


def _stay(*_: Any, **__: Any) -> None:
    """Keep the learning rate."""


class StepClock(Callback):
    """Takes the time of a step, from the first after ``warmup`` steps to the last.

    Under manual optimization, which steps as often as it likes in a batch, a step is a batch.
    """

    def __init__(self, *, warmup: int) -> None:
        self._warmup, self._batches = warmup, 0
        self._marks: list[tuple[int, Any]] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        step = trainer.global_step if pl_module.automatic_optimization else self._batches
        if trainer.global_step >= self._warmup and (not self._marks or self._marks[-1][0] < step):
            self._marks.append((step, _mark(trainer.strategy.root_device)))

    @property
    def step_ms(self) -> float:
        """Milliseconds of one step.

        Raises:
            ValueError: If no whole step came after those that do not count.
        """
        if len(self._marks) < 2:
            raise ValueError(
                f"No step was timed: {len(self._marks)} of {self._batches} batches ended after {self._warmup} steps."
                " Give more --steps, or --steps 0 to do without the time of a whole step."
            )
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        if isinstance(start, float):
            return 1000 * (end - start) / (last - first)
        end.synchronize()
        return start.elapsed_time(end) / (last - first)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
