"""Finds parameters that get no gradient because of a change by this package, in the first steps.

A parameter whose ``grad`` is still None before the third step of its optimizer is suspicious. The batch of that step
then runs forward twice more, once as it is and once with the original forwards. If only the second forward reaches the
parameter, a change by this package keeps it from training, which is an error. Nothing here synchronizes.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_ups._compat.lightning.steps import before_hooks_of_a_step
from lightning_ups.order.run import Context, Placement
from lightning_ups.transforms.forward import original_forwards, replacing_parts
from lightning_ups.transforms.patching import instead_of

_STEPS = 3  # optimizer steps in which a parameter has no gradient
_STEPS_BETWEEN_LOOKS = 100  # for parameters that were unfrozen within an epoch


def held_by(optimizers: Iterable[Any]) -> set[nn.Parameter]:
    """Return the parameters that ``optimizers`` hold."""
    return {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def watch_gradients(trainer: Trainer, context: Context, *, held: Iterable[nn.Parameter] = ()) -> None:
    """Watch the gradients of a fit that begins, until its changes are undone, unless they are already watched.

    Args:
        trainer: The Trainer of a fit, with its optimizers created.
        context: The context of the fit.
        held: The parameters that the optimizers held before a change by this package.

    Raises:
        RuntimeError: If an optimizer has lost a parameter; in a later step, if a parameter is kept from training.
    """
    lost = {*held} - held_by(trainer.optimizers)
    if names := [name for name, p in trainer.lightning_module.named_parameters() if p.requires_grad and p in lost]:
        raise RuntimeError(
            f"{_listed(names)} of {type(trainer.lightning_module).__name__} would not train: their optimizer was"
            " replaced by one without them. This is a bug in lightning_ups or in a Step: please report it."
        )
    if not context.watches_gradients:
        context.watches_gradients = True
        context.undo.callback(_Watch(trainer).end)


class _Watch:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._watched: dict[nn.Parameter, int] = {}  # number of steps without a gradient
        self._watched_then: set[nn.Parameter] = set()  # at the last look, not counting those of epochs
        self._trainable: set[nn.Parameter] = set()
        self._epoch, self._calls = -1, 0
        self._batch: tuple[Any, ...] | None = None
        self._state: tuple[Any, ...] = ()
        self._stock_step = trainer.strategy.training_step
        self._undo, self._keeping = ExitStack(), ExitStack()
        self._undo.enter_context(before_hooks_of_a_step(trainer.precision_plugin, self._check_step))

    def end(self) -> None:
        """Restore the replaced methods of the precision and the strategy."""
        self._undo.close()
        self._watched = {}
        self._keep_no_batch()

    def _keep_batches(self) -> None:
        """Keep the batch of each step from the next on: a decision needs that of a later step."""
        self._keep_no_batch()
        stock = self._stock_step = self._trainer.strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._batch, self._state = args, _random_state()
            return stock(*args, **kwargs)

        self._keeping.enter_context(instead_of(self._trainer.strategy, "training_step", training_step))

    def _keep_no_batch(self) -> None:
        self._keeping.close()
        self._batch = None

    def _check_step(self, model: LightningModule, optimizer: Any) -> None:
        # Called in each step of a fit: kept short, and reads no property of the Trainer.
        self._calls += 1
        epoch = self._trainer.fit_loop.epoch_progress.current.completed
        if epoch != self._epoch or not self._calls % _STEPS_BETWEEN_LOOKS:
            self._epoch = epoch
            self._look()
        if self._watched:
            self._check(model, optimizer)

    def _look(self) -> None:
        """Watch parameters that have become trainable, at the start of an epoch and every few steps."""
        if not self._calls % _STEPS_BETWEEN_LOOKS:
            # Parameters that were already watched then are stepped by no optimizer, or are frozen again.
            self._watched = {p: steps for p, steps in self._watched.items() if p not in self._watched_then}
            self._watched_then = {*self._watched}
        trainable = {p for p in held_by(self._trainer.optimizers) if p.requires_grad}
        if new := trainable - self._trainable:
            self._watched.update(dict.fromkeys(new, 0))
            self._keep_batches()
        elif not self._watched:
            self._keep_no_batch()
        self._trainable = trainable

    def _check(self, model: LightningModule, optimizer: Any) -> None:
        mine = held_by([optimizer])
        if all(p.grad is None for p in mine):
            return  # the step is skipped, or the gradients were taken elsewhere
        suspects = []
        for parameter in mine & self._watched.keys():
            # A hook after accumulation may have moved the gradient to an optimizer of this package.
            if parameter.grad is not None or parameter._post_accumulate_grad_hooks:
                del self._watched[parameter]
            elif not parameter.requires_grad:
                del self._watched[parameter]  # found again once it is unfrozen
            else:
                self._watched[parameter] += 1
                if self._watched[parameter] == _STEPS:
                    suspects.append(parameter)
                    del self._watched[parameter]
        if suspects:
            self._decide(model, suspects)
        if not self._watched:
            self._keep_no_batch()

    def _decide(self, model: LightningModule, suspects: Sequence[nn.Parameter]) -> None:
        parts = [*dict.fromkeys(replacing_parts(model))]
        if not parts:
            return
        names = [name for name, p in model.named_parameters() if any(p is suspect for suspect in suspects)]
        placement = Placement.of(self._trainer.strategy)
        if not model.automatic_optimization or self._trainer.world_size > 1 or placement.shards or self._batch is None:
            rank_zero_info(f"{_listed(names)}: no gradient in the first {_STEPS} steps.")
            return
        try:
            with original_forwards(model):
                wanted = self._reached(model, suspects)
            missed = [
                p for p, one, other in zip(suspects, wanted, self._reached(model, suspects), strict=True) if one > other
            ]
            cause = next((part for part in parts if missed and self._reaches_without(part, model, missed)), None)
        except Exception as error:  # noqa: BLE001  (a check must not end a run that would go on)
            rank_zero_info(f"{_listed(names)}: no gradient in the first {_STEPS} steps ({type(error).__name__}).")
            return
        if missed:
            names = [name for name, p in model.named_parameters() if any(p is each for each in missed)]
            raise RuntimeError(
                f"{_listed(names)} of {type(model).__name__} get no gradient because of {_name(cause)}."
                " Without it they would train. Leave it out, and please report this bug."
            )

    def _reaches_without(self, part: str, model: LightningModule, missed: Sequence[nn.Parameter]) -> bool:
        with original_forwards(model, part=part):
            return all(self._reached(model, missed))

    def _reached(self, model: LightningModule, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Run the step's batch forward again, and return for each of ``parameters`` whether its loss depends on it."""
        from lightning_ups.transforms.compile import State  # the compiler: imported only if needed

        assert self._batch is not None
        before, random_now = State(model), _random_state()
        try:
            _set_random_state(self._state)
            with _logging_off(self._trainer, model), torch.enable_grad():
                output = self._stock_step(*self._batch)
                loss = output["loss"] if isinstance(output, dict) else output
                if not isinstance(loss, Tensor):
                    return [False] * len(parameters)
                grads = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
        finally:
            before.put_back()
            _set_random_state(random_now)
        return [grad is not None for grad in grads]


@contextmanager
def _logging_off(trainer: Trainer, model: LightningModule) -> Iterator[None]:
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    own = {name: vars(model).get(name) for name in ("log", "log_dict")}
    for name in own:
        vars(model)[name] = _log_nothing
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name, value in own.items():
            if value is None:
                del vars(model)[name]
            else:
                vars(model)[name] = value


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


def _random_state() -> tuple[Any, ...]:
    device = torch.accelerator.current_accelerator(check_available=True)
    own = None if device is None else torch.get_device_module(device).get_rng_state()
    return random.getstate(), torch.get_rng_state(), own


def _set_random_state(state: tuple[Any, ...]) -> None:
    host, torchs, own = state
    random.setstate(host)
    torch.set_rng_state(torchs)
    if own is not None:
        device = torch.accelerator.current_accelerator(check_available=True)
        assert device is not None
        torch.get_device_module(device).set_rng_state(own)


def _name(part: str | None) -> str:
    names = {"compile": "Compile", "recompute": "ActivationCheckpoint"}
    return "a change of lightning_ups" if part is None else names.get(part, f"lightning_ups ({part})")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more parameters" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
