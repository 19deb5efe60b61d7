"""Lightning's automatic optimization of one batch, in the parts that a captured step needs, and what it logs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ups._compat.patches import applied

_TARGET = "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization.run"

Outputs = dict[str, Any]


class StepLoop:
    """The training of one batch by a Trainer with automatic optimization.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._loop = self._fit.epoch_loop.automatic_optimization

    def replaced(self, run: Callable[..., Outputs]) -> AbstractContextManager[None]:
        """Call ``run`` with the stock function, and its arguments, for each batch while the context is open."""

        def replacing(stock: Callable[..., Outputs]) -> Callable[..., Outputs]:
            return lambda optimizer, batch_idx, kwargs: run(stock, optimizer, batch_idx, kwargs)

        return applied(_TARGET, replacing, owner=self._loop)

    def phase(self, batch_idx: int) -> tuple[int, bool, bool]:
        """Return how many batches are accumulated, whether this is the first, and whether the optimizer steps."""
        if (size := self._trainer.accumulate_grad_batches) == 1:
            return 1, True, True
        return size, batch_idx % size == 0, not self._fit._should_accumulate()

    def closure(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Outputs:
        """Run the training step and backward, and drop the gradients of earlier steps if this batch is the first."""
        closure = self._loop._make_closure(kwargs, optimizer, batch_idx)
        closure()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def optimizer_step(self, batch_idx: int, closure: Callable[[], Any]) -> None:
        """Step the optimizer as Lightning does, and count it; ``closure`` returns the loss."""
        self._loop._optimizer_step(batch_idx, closure)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let the loop count nothing while the context is open."""
        progress = self._loop.optim_progress
        self._loop.optim_progress = deepcopy(progress)
        try:
            yield
        finally:
            self._loop.optim_progress = progress

    def count(self, *, is_first: bool, steps: bool) -> None:
        """Count what the loop counts for one batch."""
        progress = self._loop.optim_progress.optimizer
        if steps:
            progress.step.increment_ready()
        if is_first:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if steps:
            progress.step.increment_completed()


class Logged:
    """What a step logs: recorded once, and logged again after each replay.

    Args:
        module: The module whose ``log`` is recorded.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._entries: list[_Entry] = []

    @property
    def values(self) -> list[Tensor]:
        """The recorded values."""
        return [entry.value for entry in self._entries]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is logged while the context is open, and log nothing."""
        self._entries = []
        own = vars(self._module).get("log")
        vars(self._module)["log"] = self._record
        try:
            yield
        finally:
            if own is None:
                del vars(self._module)["log"]
            else:
                vars(self._module)["log"] = own

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor) or value.device != self._module.device:
            kind = "a value on the CPU" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise RuntimeError(f"self.log({name!r}) gets {kind}, and a replay repeats tensors on the device alone")
        fx: str = self._module._current_fx_name or "training_step"
        self._entries.append(_Entry(fx, name, value.detach(), args, kwargs))

    def repeat(self, trainer: Any) -> None:
        """Log the present values."""
        connector, results = trainer._logger_connector, trainer._results
        for entry in self._entries:
            metric = None if entry.batch_size is None else results.get(entry.key)
            if metric is None or connector.should_reset_tensors(entry.fx):
                entry.log(self._module, results)
                continue
            # What `log` does for a value that it knows, without its checks of the arguments.
            metric.forward(entry.value, entry.batch_size)
            metric.has_reset = False
            connector._current_fx = entry.fx


class _Entry:
    def __init__(self, fx: str, name: str, value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fx, self.name, self.value, self.args, self.kwargs = fx, name, value, args, kwargs
        self.key = f"{fx}.{name}"
        self.batch_size: int | None = None  # once it is known

    def log(self, module: LightningModule, results: Any) -> None:
        before = module._current_fx_name
        module._current_fx_name = self.fx
        try:
            module.log(self.name, self.value, *self.args, **self.kwargs)
        finally:
            module._current_fx_name = before
        if results is not None and (metric := results.get(self.key)) is not None:
            given = self.kwargs.get("batch_size")
            self.batch_size = results._extract_batch_size(metric, given, metric.meta)
