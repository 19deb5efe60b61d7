"""Replays a whole training step as one CUDA graph."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.step_loop import Logged, Outputs, StepLoop
from lightning_ups._compat.torch.optimizers import needs_closure
from lightning_ups.order import OnlyOne, Run, Stage, refuse_capture, refuse_second, report_of
from lightning_ups.order.arguments import check_least
from lightning_ups.order.refusals import overridden
from lightning_ups.transforms.patching import instead_of
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.step_graph import (
    ConstantIndex,
    CudaGraph,
    EmulatedGraph,
    Graph,
    HostState,
    Rates,
    can_capture,
    device_rates,
    difference,
    layout_of,
    line_of,
    refusing_reads,
    warmed_up,
)

_PART = "StepGraph"
_BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
_MOST_KINDS = 256  # that are counted, where shapes vary without end


class StepGraph(Callback, OnlyOne):
    """Capture a whole training step as one CUDA graph, and replay it: forward, backward, clipping and optimizer step.

    Use it where the GPU waits for the host: small models and small batches of one shape, on one GPU. The first steps
    run as without this callback. Then a step is captured, and each later batch is copied to the memory that the graph
    reads. What the step logs is logged again after each replay. Random numbers differ from step to step, as always.

    A replay repeats the work of the GPU and no Python code of the step. What would go wrong is an error, by name:
    hooks between forward and backward, values read on the host, attributes that the step changes, numbers that it logs.
    A batch of another shape runs without the graph.

    The optimizer's step is in the graph if it is torch's Adam, AdamW or SGD with ``fused=True``. Otherwise, and if
    hooks run before the step, the optimizer steps outside of the graph, and a log line says why.

    Args:
        warmup_steps: Training steps of one shape before it is captured.
        shapes: The number of batch shapes that get a graph. Each keeps its activations in memory.
        emulate: Run the step again where a graph would be replayed, on any device, for tests.

    Raises:
        ValueError: If an argument is out of range, or if this run does not support it.
        RuntimeError: If a step cannot be captured.

    Example::

        Trainer(callbacks=[StepGraph(), Compile(scope="model")], precision="bf16-mixed")
    """

    captures_step = True

    def __init__(self, *, warmup_steps: int = 3, shapes: int = 1, emulate: bool = False) -> None:
        for name, value in (("warmup_steps", warmup_steps), ("shapes", shapes)):
            check_least(name, value, 1, of=_PART, why="It is a number of steps or shapes.")
        self.warmup_steps, self.shapes, self.emulate = warmup_steps, shapes, emulate
        self._running: _Running | None = None
        self._undo = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run = Run.of(trainer)
        refuse_second(run)
        refuse_capture(run)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        if needs_closure(trainer.optimizers[0]):
            raise ValueError(
                f"StepGraph is given with {type(trainer.optimizers[0]).__name__}, which computes the loss several times"
                " in a step. Use another optimizer, or leave StepGraph out."
            )
        self._running = _Running(self, trainer)
        self._undo.enter_context(self._running.loop.replaced(self._running.run))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running is not None:
            self._running.checks_memory = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running is not None:
            self._running.checks_memory = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running is not None:
            self._running.conclude()
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._undo.close()
        self._running = None


class _Captured:
    """A captured step: its graph, and the memory that it reads and writes."""

    def __init__(self, graph: Graph, before: list[Tensor | None] | None) -> None:
        self.graph, self.before = graph, before  # and the gradients to which it adds, or None
        self.step: Callable[[], list[Tensor]] = list
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.outputs: Outputs = {}
        self.logged: Logged | None = None


@dataclass
class _Kind:
    """The steps of one layout and phase."""

    steps: int = 0
    captured: _Captured | None = None


class _Running:
    """The steps of a fit."""

    def __init__(self, settings: StepGraph, trainer: Trainer) -> None:
        self.loop = StepLoop(trainer)
        self._settings, self._trainer, self._module = settings, trainer, trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._emulates = settings.emulate or self._device.type != "cuda"
        self._kinds: dict[tuple[Hashable, Hashable], _Kind] = {}
        self._layouts: list[Hashable] = []  # those with a graph
        self._bound: list[Tensor | None] | None = None  # the gradients of parameters, as a graph has left them
        self._parameters: Sequence[nn.Parameter] = [*self._module.parameters()]
        self._memory: list[Any] = []
        self.checks_memory = False  # before the next batch: callbacks may have replaced tensors
        self._rates: Rates | None = None
        self._stream = None if self._emulates else torch.cuda.Stream(self._device)
        self._pool: Any = None if self._emulates else torch.cuda.graph_pool_handle()
        self._replayed, self._said_other = 0, False
        callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._compile = [c for c in callbacks if getattr(c, "stage", None) is Stage.COMPILE]
        self._prefetch = [c for c in callbacks if type(c).__name__ == "DevicePrefetch"]
        self._hooks: list[Callable[..., Any]] = [c.on_before_backward for c in self._prefetch]
        self._outside = self._why_outside(callbacks)

    def _why_outside(self, callbacks: Sequence[Any]) -> str | None:
        """Return why the optimizer steps outside of the graph, or None if it does not."""
        if hooks := overridden(self._module, callbacks, _BEFORE_STEP):
            return f"{hooks[0]} runs before its step"
        return can_capture(self._trainer.optimizers[0])

    # One batch

    def run(self, stock: Callable[..., Outputs], optimizer: Optimizer, batch_idx: int, kwargs: Any) -> Outputs:
        """Train on one batch, by replaying a graph if there is one."""
        if self.checks_memory:
            self._check_memory()
        inputs: list[Tensor] = []
        try:
            layout = layout_of(kwargs["batch"], inputs, device=self._device)
        except TypeError as error:
            raise RuntimeError(
                f"StepGraph cannot copy a batch that contains {error}. Return containers of tensors on"
                f" {self._device}, numbers and strings from the loader, or leave StepGraph out."
            ) from None
        phase = self.loop.phase(batch_idx)
        _, is_first, steps = phase
        in_graph = steps and self._outside is None  # the optimizer's step
        if (kind := self._kinds.get((layout, phase))) is None:
            kind = _Kind()
            if len(self._kinds) < _MOST_KINDS:
                self._kinds[layout, phase] = kind
        kind.steps += 1
        captured = kind.captured
        if captured is not None and (captured.before is None or captured.before is self._bound):
            if not in_graph or not self._has_new_options():
                if captured.inputs:
                    torch._foreach_copy_(captured.inputs, inputs)
                work = partial(self._replay, captured, in_graph=in_graph)
                return self._with_step(captured, work, batch_idx, is_first=is_first, steps=steps)
        elif captured is None and self._may_capture(kind, layout, is_first=is_first):
            captured = self._captured(stock, optimizer, batch_idx, kwargs, is_first=is_first, in_graph=in_graph)
            work = partial(self._capture, kind, layout, captured)
            return self._with_step(captured, work, batch_idx, is_first=is_first, steps=steps)
        self._bound = None
        if self._layouts and layout not in self._layouts and not self._said_other:
            self._said_other = True
            differs = difference(layout, self._layouts[0])
            self._say(f"batches of another shape run without the graph ({differs}); raise shapes to capture them too")
        is_warmup = captured is None and kind.steps <= self._settings.warmup_steps
        with warmed_up(self._stream if is_warmup else None):
            return stock(optimizer, batch_idx, kwargs)

    def _may_capture(self, kind: _Kind, layout: Hashable, *, is_first: bool) -> bool:
        if kind.steps <= self._settings.warmup_steps or (not is_first and self._bound is None):
            return False
        # Compile still compares, or has something new to check.
        if any(callable(callback.on_train_batch_end) for callback in self._compile):
            return False
        return layout in self._layouts or len(self._layouts) < self._settings.shapes

    def _has_new_options(self) -> bool:
        if self._rates is None or not self._rates.changed():
            return False
        self._outside = "an option of the optimizer changes during training"
        self._forget()
        self._say(f"the optimizer steps outside of the graph from now on: {self._outside}")
        return True

    def _captured(
        self,
        stock: Callable[..., Outputs],
        optimizer: Optimizer,
        batch_idx: int,
        kwargs: Any,
        *,
        is_first: bool,
        in_graph: bool,
    ) -> _Captured:
        """Return what is about to be captured: a step on copies of the batch."""
        static = {**kwargs, "batch": apply_to_collection(kwargs["batch"], Tensor, Tensor.clone)}
        if "batch_idx" in static:
            static["batch_idx"] = ConstantIndex(batch_idx)
        if in_graph and self._rates is None:
            self._rates = Rates(optimizer, self._device)
        graph: Graph = EmulatedGraph(self._parameters) if self._stream is None else CudaGraph(self._stream, self._pool)
        captured = _Captured(graph, None if is_first else self._bound)
        layout_of(static["batch"], captured.inputs, device=self._device)

        def step() -> list[Tensor]:
            logged = Logged(self._module)
            with ExitStack() as around:
                around.enter_context(self.loop.uncounted())
                around.enter_context(logged.recording())
                around.enter_context(device_rates(optimizer, self._rates if in_graph else None))
                for callback in self._prefetch:
                    around.enter_context(instead_of(callback, "on_before_backward", _do_nothing))
                if self._emulates and captured.logged is None:
                    around.enter_context(_checked_reads(self._trainer.strategy))
                outputs = (stock if in_graph else self.loop.closure)(optimizer, batch_idx, static)
            if not outputs:
                raise RuntimeError("training_step returned None")
            outputs = apply_to_collection(outputs, Tensor, Tensor.detach)
            if captured.logged is None:
                captured.logged, captured.outputs = logged, outputs
            tensors = [*logged.values]
            apply_to_collection(outputs, Tensor, tensors.append)
            return tensors

        captured.step = step
        return captured

    def _capture(self, kind: _Kind, layout: Hashable, captured: _Captured) -> None:
        name, host = type(self._module).__name__, HostState(self._module, self._device)
        if self._rates is not None:
            self._rates.update()
        try:
            captured.graph.capture(captured.step)
        except Exception as error:
            raise RuntimeError(
                f"StepGraph cannot capture the step of {name}: {line_of(error)}."
                " A CUDA graph reads no values on the host, and each replay repeats what was captured."
                " Keep values in tensors on the device, move the line to on_train_batch_end, or leave StepGraph out."
            ) from error
        if changes := host.changes():
            raise RuntimeError(
                f"StepGraph cannot replay the step of {name}: it changes {listed(changes)} on the host."
                " Change tensors in place and draw random numbers on the device, do it in on_train_batch_end,"
                " or leave StepGraph out."
            )
        kind.captured = captured
        gradients: list[Tensor | None] = [parameter.grad for parameter in self._parameters]
        before = captured.before
        is_same = before is not None and all(one is other for one, other in zip(before, gradients, strict=True))
        captured.gradients = self._bound = before if is_same and before is not None else gradients
        self._memory = self._look()
        if layout not in self._layouts:
            self._layouts.append(layout)
            where = "" if self._outside is None else f"; the optimizer steps outside of it: {self._outside}"
            self._say(f"the step is one {'emulated' if self._emulates else 'CUDA'} graph{where}")

    def _replay(self, captured: _Captured, *, in_graph: bool) -> None:
        if in_graph and self._rates is not None:
            self._rates.update()
        captured.graph.replay()
        if self._outside is not None:
            self._bound = None  # its step may have dropped them

    def _with_step(
        self, captured: _Captured, work: Callable[[], None], batch_idx: int, *, is_first: bool, steps: bool
    ) -> Outputs:
        """Do ``work``, inside Lightning's step of the optimizer unless that is in the graph, and return the outputs."""
        if not steps or self._outside is None:
            work()
            self.loop.count(is_first=is_first, steps=steps)
            return self._after_replay(captured)
        outputs: list[Outputs] = []

        def closure() -> Any:
            work()
            self.loop.count(is_first=is_first, steps=False)
            outputs.append(self._after_replay(captured))
            return outputs[0]["loss"]

        self.loop.optimizer_step(batch_idx, closure)
        return outputs[0]

    def _after_replay(self, captured: _Captured) -> Outputs:
        """Do on the host what follows a replay, and return copies of its outputs."""
        self._replayed += 1
        for hook in self._hooks:
            hook(self._trainer, self._module, captured.outputs["loss"])
        if self._bound is not captured.gradients:
            self._bound = captured.gradients
            for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
                parameter.grad = gradient
        if captured.logged is not None:
            captured.logged.repeat(self._trainer)
        return {
            name: value.clone() if isinstance(value, Tensor) else apply_to_collection(value, Tensor, Tensor.clone)
            for name, value in captured.outputs.items()
        }

    # The run

    def _forget(self) -> None:
        self._kinds.clear()
        self._layouts.clear()
        self._bound = self._rates = None

    def _check_memory(self) -> None:
        """Capture anew if tensors of the step have moved."""
        self.checks_memory = False
        self._bound = None  # validation drops gradients
        if self._layouts and self._look() != self._memory:
            self._forget()
            self._say("parameters, buffers or optimizer state have moved: the step is captured anew")

    def _look(self) -> list[Any]:
        states = (state for optimizer in self._trainer.optimizers for state in optimizer.state.values())
        values = (value for state in states if isinstance(state, dict) for value in state.values())
        return [
            *[(parameter.data_ptr(), parameter.requires_grad) for parameter in self._module.parameters()],
            *[buffer.data_ptr() for buffer in self._module.buffers()],
            *[value.data_ptr() for value in values if isinstance(value, Tensor)],
            *[module.training for module in self._module.modules()],
            self._trainer.gradient_clip_val,
        ]

    def conclude(self) -> None:
        """Report what was replayed."""
        report_of(self._trainer).update(_PART, replayed=self._replayed, graphs=len(self._layouts))
        if not self._replayed:
            layouts = [*dict.fromkeys(layout for layout, _ in self._kinds)]
            differ = f"batches differ ({difference(*layouts[:2])})" if len(layouts) > 1 else "the run was too short"
            rank_zero_warn(
                f"StepGraph captured no step, because {differ}. It captures after {self._settings.warmup_steps} steps"
                " with batches of one shape, and once Compile has chosen. Use such batches, or leave StepGraph out."
            )

    def _say(self, line: str) -> None:
        rank_zero_info(f"{_PART}: {line}")
        report_of(self._trainer).note(_PART, line)


def _do_nothing(*_: Any) -> None:
    pass


@contextmanager
def _checked_reads(strategy: Any) -> Iterator[None]:
    stock = strategy.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        with refusing_reads():
            return stock(*args, **kwargs)

    with instead_of(strategy, "training_step", training_step):
        yield
