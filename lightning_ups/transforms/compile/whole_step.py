"""A training step that is compiled as a whole, as ``torch.compile(module)`` compiles it, where models are little of it.

The first call that compiles is a step of the run: no code of the user runs twice. Graphs are tried on copies, as those
of blocks, and one that fails, or that draws random numbers, runs as it was captured.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_ups._compat.contexts import without
from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand
from lightning_ups.transforms.compile.compiler import Compiled
from lightning_ups.transforms.compile.contest import Contest
from lightning_ups.transforms.compile.cuda_graphs import Slot
from lightning_ups.transforms.compile.frame import Compiler, own_code, own_name
from lightning_ups.transforms.compile.step_source import unfit_for_compiling
from lightning_ups.transforms.compile.trial import GraphError, Rehearsal, drawing, with_trial, writing_past_autograd
from lightning_ups.transforms.quoted import first_line
from lightning_ups.transforms.recompute import is_recomputed

LEAST_OPERATORS, LEAST_SHARE = 6, 0.05  # outside of what is compiled, so that compiling all may be worth its seconds
MOST_BREAKS, MOST_COMPILATIONS = 16, 8  # of graphs; calls that compile
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOGS = ("log", "log_dict")


class Step:
    """Replaces the training step of ``module`` while `replaced` is open, and compiles it where ``is_on`` says so.

    Args:
        module: The module.
        compiler: How to compile.
        blocks: What is compiled of the modules that the step calls, which is left aside where the step is compiled.
        note: Called with what was found.
    """

    def __init__(self, module: nn.Module, compiler: Compiler, blocks: Compiled, note: Callable[[str], None]) -> None:
        self._module, self._blocks, self._note = module, blocks, note
        self.compiler = compiler
        kind: Any = type(module)
        self.__wrapped__, self._inner = module.training_step, kind.training_step  # Lightning asks for its arguments
        self._outside: int | None = None
        self._run: Callable[..., Any] | None = None
        self._logs: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._breaks = self._compilations = 0
        self.is_on = False  # in this step
        self.left: str | None = None  # why it runs uncompiled for good

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the training step of the module while the context is open."""
        vars(self._module)["training_step"] = self
        try:
            with without("WON'T CONVERT", "torch._dynamo.convert_frame"):  # of errors that do no harm here
                yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give the module its own training step back."""
        self.is_on, self._run = False, None
        if vars(self._module).get("training_step") is self:
            del vars(self._module)["training_step"]

    def watch(self, loss: Tensor) -> None:
        """Count the operators outside of compiled code that have led to ``loss``."""
        self._outside = _operators(loss)

    def is_worth(self) -> bool:
        """Return whether enough operators of the step are outside of compiled code, and nothing speaks against it."""
        least = max(LEAST_OPERATORS, LEAST_SHARE * self._blocks.operators)
        if self._outside is None or self._outside < least:
            return False
        self._hooks = [*_hooks(self._module)]
        if any(self._hooks) or any(parameter._backward_hooks for parameter in self._module.parameters()):
            self.leave("hooks are registered")
        elif any(is_recomputed(each) or dynamo.compiled_by_itself(each) for each in self._module.modules()):
            self.leave("a part of the model is recomputed, or compiled by the model itself")
        elif (why := unfit_for_compiling(self._module)) is not None:
            self.leave(why)
        return self.left is None

    def settle(self, contest: Contest, *, won: bool) -> None:
        """Run compiled from now on if that ``won``, or uncompiled."""
        self.is_on = won and self.left is None
        if self.is_on:
            self._note(f"training_step is compiled as a whole, since a step takes {contest}")
        else:
            self.leave(f"a step takes {contest}")

    def leave(self, why: str) -> None:
        """Run uncompiled from now on."""
        if self.left is None:
            self.left = why
            self.restore()
            self._note(f"training_step is not compiled as a whole: {why}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step."""
        if not self.is_on or any(self._hooks):  # Dynamo does not see hooks that are added later
            return self._inner(self._module, *args, **kwargs)
        if self._run is None:
            self._run = self._compiled()
        start, paused, own = dynamo.mark(), self._blocks.paused, vars(self._module)
        self._blocks.paused = True
        logs = {name: log for name, log in self._logs.items() if name not in own}
        own.update(logs)
        try:
            with dynamo.errors_left_to_python():
                return self._run(self._module, *args, **kwargs)
        finally:
            self._blocks.paused = paused
            for name in logs:
                own.pop(name, None)
            if dynamo.compiled_since(start):
                self._learn(start)

    def _compiled(self) -> Callable[..., Any]:
        # What Lightning does with a value that is logged is no part of a graph.
        self._logs = {name: torch.compiler.disable(getattr(self._module, name)) for name in _LOGS}
        name = own_name(f"{type(self._module).__name__}_training_step")
        return torch.compile(own_code(self._inner, name), backend=_Backend(self), dynamic=self.compiler.dynamic)

    def _learn(self, start: dynamo.Mark) -> None:
        compilations, breaks = dynamo.compilations_since(start)
        self._breaks += len(breaks)
        self._compilations += 1
        self._hooks = [*_hooks(self._module)]
        if any(each.hit_limit for each in compilations) or self._compilations > MOST_COMPILATIONS:
            guards = [each.guard for each in compilations if each.guard is not None]
            self.leave(f"it is compiled over and over, since a guard fails{f': {guards[-1]}' if guards else ''}")
        elif self._breaks > MOST_BREAKS:
            self.leave(f"it has {self._breaks} graph breaks")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)

    # What trial.Caller asks for.

    is_settled = True
    slot: Slot | None = None

    def takes_slot(self, graph: fx.GraphModule, demand: Demand) -> bool:
        """Return False: nothing is recorded."""
        return False

    def made_graph(self, *, from_cache: bool) -> None:
        """Leave it."""

    def left_small_graph(self) -> None:
        """Leave it."""

    def wants_trial(self) -> bool:
        """Return True: each new graph is tried."""
        return True

    def wants_again(self, graph: fx.GraphModule) -> bool:
        """Return False."""
        return False

    def tried(self, graph: fx.GraphModule, rehearsal: Rehearsal) -> None:
        """Leave it."""

    def not_tried(self, graph: fx.GraphModule, reason: str) -> None:
        """Leave it."""

    def may_save(self, written: Tensor) -> bool:
        """Return True: nothing is recomputed."""
        return True

    def runs_graph(self, graph: fx.GraphModule) -> None:
        """Leave it."""


class _Backend:
    """Compiles the graphs of a step, or lets them run as they were captured."""

    def __init__(self, step: Step) -> None:
        self._step, compiler = step, step.compiler
        self.__name__ = self.compiler_name = compiler.backend
        self._compile = dynamo.backend_compiler(compiler.backend, mode=compiler.mode, dynamic=compiler.dynamic)

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured = graph.forward
        if (name := drawing(graph)) is not None:
            self._step.leave(f"it draws random numbers, by {name}")
        elif (name := writing_past_autograd(graph)) is not None:
            self._step.leave(f"it uses {name}")
        if self._step.left is not None:
            return captured
        try:
            with dynamo.backward_compiled_with_forward():
                run = dynamo.without_disabling(self._compile(graph, inputs))
        except Exception as error:  # noqa: BLE001  (whatever a compiler raises)
            self._step.leave(first_line(error))
            return captured
        tried = with_trial(run, graph, caller=lambda: self._step)

        def safe(*args: Any) -> Any:
            try:
                return tried(*args)
            except GraphError as error:
                self._step.leave(first_line(error))
                return captured(*args)

        return safe


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the dictionaries of the hooks of all modules within ``module``, and of hooks of any module."""
    yield from dynamo.hooks_of_all_modules()
    for each in module.modules():
        yield from (getattr(each, name) for name in _HOOKS)


def _operators(loss: Tensor) -> int:
    """Return the number of operators in the graph of ``loss`` that no compiled code has run."""
    seen, left, number = set[Any](), [loss.grad_fn], 0
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number += type(node).__name__ not in ("AccumulateGrad", "CompiledFunctionBackward")
        left += [each for each, _ in node.next_functions]
    return number
