"""The dry run: one training step of a module on fake tensors, with a stand-in for its Trainer."""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ups._compat.contexts import only_from
from lightning_ups._compat.lightning.fit_setup import optimizers_of
from lightning_ups._compat.lightning.trainer import trainer_of
from lightning_ups._compat.torch.fake_tensors import run_backward, without_checks
from lightning_ups.insight.dry_run.copies import FakeCopies
from lightning_ups.insight.dry_run.kinds import NotCopied
from lightning_ups.insight.dry_run.known_values import AnswerValues, KnownValues
from lightning_ups.insight.dry_run.plain_copies import PlainCopies
from lightning_ups.transforms.random_state import random_state, restore_random_state


class DryRun:
    """A copy of a module with a copy of a batch and a stand-in for the Trainer, in which a training step can run.

    Args:
        module: Copied, with its Trainer's attributes if it has one.
        batch: The first argument of ``training_step``; copied.
        copies: Makes the copies.
        **values: Attributes of the stand-in for the Trainer.

    Attributes:
        module: The copied module.
        batch: The copied batch.
        trainer: The stand-in for its Trainer.
        float8_flops: FLOPs of layers converted to float8, in a plain run.
    """

    def __init__(self, module: Any, batch: Any, *, copies: FakeCopies, **values: Any) -> None:
        self.copies = copies
        self._real_trainer = real = trainer_of(module)
        self.trainer = StandInTrainer(real, copies.copy, **values)
        if real is not None:
            copies.keep(real, self.trainer)
        self.module, self.batch = copies.copy(module, "self"), copies.copy(batch, "the batch")
        if isinstance(self.module, LightningModule):
            self.module._trainer = self.trainer  # type: ignore[assignment]  # the setter wants a Trainer
            self._set_optimizers([])

    @property
    def float8_flops(self) -> int:  # noqa: D102
        return self.copies.float8_flops if isinstance(self.copies, PlainCopies) else 0

    def _set_optimizers(self, optimizers: Sequence[Any], *, schedulers: int = 0) -> None:
        self.trainer.optimizers = [*optimizers]
        replace_methods(self.module, optimizers=optimizers, schedulers=schedulers, backward=_backward)

    def use_stand_in_optimizers(self) -> None:
        """Let the module's step use as many optimizers as it has in training; all are no-ops."""
        if not isinstance(self.module, LightningModule):
            return
        real = self._real_trainer
        optimizers, schedulers = ([], []) if real is None else (real.optimizers, real.lr_scheduler_configs)
        if not optimizers and not self.module.automatic_optimization:
            optimizers, schedulers = optimizers_of(self.module.configure_optimizers())
        self._set_optimizers([StandInOptimizer() for _ in optimizers], schedulers=len(schedulers))
        vars(self.module).update(dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), lambda *_, **__: None))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let operators compute nothing while the context is open."""
        with (
            without_checks(),
            only_from(logging.CRITICAL, "torch._subclasses.fake_tensor"),  # it logs what it raises
            self.copies.mode or torch.device("meta"),
        ):
            yield


@contextmanager
def plain_run(module: Any, batch: Any, *, knows_values: bool = True) -> Iterator[DryRun]:
    """Open a dry run of ``module`` as its author wrote it, in which questions for values are answered.

    The run may go on at the same time: nothing of it changes, random generators included.

    Raises:
        NotCopiedError: If the step uses an object that cannot be copied.
    """
    state = random_state()
    copies = PlainCopies()
    try:
        dry_run = DryRun(module, batch, copies=copies)
        with _quiet(), copies.uses.watched(), dry_run.opened():
            if isinstance(dry_run.module, NotCopied):
                dry_run.module()  # raises
            dry_run.use_stand_in_optimizers()
            with AnswerValues(copies.known if knows_values else KnownValues()):
                yield dry_run
    finally:
        copies.close()
        restore_random_state(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Run eagerly, in float32, with gradients, without warnings, and without writes to the arrays of the run."""
    warns_always = torch.is_warn_always_enabled()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # A tensor that is made of a read-only view could be written.
        warnings.filterwarnings("error", message="The given (NumPy array|buffer) is not writable")
        torch.set_warn_always(True)
        stack.callback(torch.set_warn_always, warns_always)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def call_training_step(module: Any, batch: Any) -> Any:
    """Call ``module.training_step`` as Lightning's loop does, and return its result."""
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        return module.training_step(iter([(batch, 0, 0)]))
    positional = [p for p in parameters.values() if p.kind != p.KEYWORD_ONLY]
    return module.training_step(batch, 0) if len(positional) > 1 else module.training_step(batch)


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in the result of a training step, or None if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _backward(loss: Tensor, *_: Any, **__: Any) -> None:
    run_backward(loss.sum())


# Stand-ins for the Trainer, its optimizers and its loggers


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
