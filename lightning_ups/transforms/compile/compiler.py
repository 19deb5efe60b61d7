"""Compiling the forward of modules in place, and knowing what came of it.

A block is a module whose forward calls a frame, which Dynamo compiles and which equal blocks share. The block's own
forward is never compiled: it counts what a call compiled, and handles what failed.
"""

import gc
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand
from lightning_ups._compat.torch.compile.partitioner import random_states_in_place
from lightning_ups._compat.torch.tensors.autograd import in_torch_func, saved_at_any_version
from lightning_ups._compat.torch.tensors.tensors import arrived
from lightning_ups._compat.torch.versions import NormWithStatistics
from lightning_ups.transforms.blocks import is_loss, roots
from lightning_ups.transforms.compile.contest import Contest
from lightning_ups.transforms.compile.cuda_graphs import COPIED_BYTES, Backwards, OwnGradients, Slot, copied, size
from lightning_ups.transforms.compile.frame import Compiler, Frame, calling, frame_of, only_loss
from lightning_ups.transforms.compile.gain import gain_of
from lightning_ups.transforms.compile.group import Group, Phase, cure_of, worth_telling
from lightning_ups.transforms.compile.mode import Clock
from lightning_ups.transforms.compile.replay import Replay, call_of
from lightning_ups.transforms.compile.trial import GraphError, Rehearsal, State
from lightning_ups.transforms.forward import Forward, replaced_forward
from lightning_ups.transforms.quoted import first_line
from lightning_ups.transforms.recompute import is_recomputed

OnFailure = Literal["raise", "eager"]
Tell = Callable[[str], None]


@contextmanager
def compiled(
    blocks: Mapping[str, nn.Module],
    compiler: Compiler,
    *,
    on_failure: OnFailure = "raise",
    trial: bool = True,
    max_recompiles: int = 3,
    tell: Tell = warnings.warn,
    keeps_outputs: bool = False,
    overwrites: bool = False,
    replay: Replay | None = None,
    gradients: OwnGradients | None = None,
    parts_of: Callable[[str], Mapping[str, nn.Module]] | None = None,
    clock: Clock | None = None,
    note: Tell = lambda _: None,
    advice: str = "",
    only_loss: Container[str] = (),
    in_step: Callable[[], bool] = lambda: True,
    losses: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Iterator["Compiled"]:
    """Compile the forward of ``blocks``, modules by name, while the context is open; equal ones share their graphs.

    Not ``module.compile()``: on torch's own classes, such as ``nn.Sequential``, that compiles nothing, in silence. A
    block inside another is left to the outer one. Nothing is compiled before the first call.

    Args:
        blocks: What to compile. Names of parameters stay as they are.
        compiler: How.
        on_failure: What a block does that does not compile: raise, or run as it is.
        trial: Whether each graph is tried, forward and backward, before its first call with gradients. A graph
            that replays a recording, or communicates, is not.
        max_recompiles: How often equal blocks may be compiled again, not counting the switch between training and
            evaluation, before ``tell`` hears of it.
        tell: Called with what the user should know.
        keeps_outputs: Whether what CUDA graphs return in training is copied out of their memory, as far as it is not
            more than ``COPIED_BYTES``, and not only scalars.
        overwrites: Whether graphs write to what those of the step before have returned and saved, so that a backward
            that comes in a later step is an error. Call ``Compiled.backwards.begin_step`` at each step.
        replay: What may choose CUDA graphs when it has measured the first step.
        gradients: What moves the gradients that graphs would overwrite, before one runs.
        parts_of: Returns the blocks within a block, which are compiled in its place if it does not compile.
        clock: Times blocks compiled and uncompiled after the first step, so that those run uncompiled that are faster
            uncompiled. None: all stay compiled.
        note: Called with what was found by that.
        advice: Appended to the warning about a block that stays uncompiled in training.
        only_loss: The blocks of whose outputs, in a training step, nothing but the loss is used. Compiled they return
            nothing else, so that neither the logits nor gradients of zero for them take memory.
        in_step: Returns whether a training step runs.
        losses: Modules outside of ``blocks`` that compute losses. Each is one graph, or runs as it is.

    Raises:
        RuntimeError: At a call, if a block does not compile and ``on_failure`` is ``"raise"``.
    """
    inside = {inner for block in blocks.values() for inner in block.modules() if inner is not block}
    run = Compiled(compiler, on_failure=on_failure, trial=trial, max_recompiles=max_recompiles, tell=tell)
    run.copied_bytes, run.replay, run.gradients = COPIED_BYTES if keeps_outputs else 0, replay, gradients
    run.backwards = Backwards() if overwrites else None
    run.only_losses = all(map(is_loss, blocks.values()))
    run.recomputed = {name for name, block in blocks.items() if is_recomputed(block)}
    run.parts_of, run.clock, run.note, run.advice = parts_of, clock, note, advice
    run.only_loss, run.in_step, run.losses = only_loss, in_step, {*losses}
    with ExitStack() as undo:
        run.undo = undo
        undo.enter_context(dynamo.telling_guards_first())
        undo.enter_context(dynamo.comparing_forwards_by_function())
        undo.enter_context(dynamo.guarding_each_parameter())
        if any(isinstance(parameter, DTensor) for block in blocks.values() for parameter in block.parameters()):
            undo.enter_context(random_states_in_place())
        run.replace({name: module for name, module in blocks.items() if module not in inside} | {**losses})
        yield run


def is_compiled(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is compiled, by `compiled` or by torch itself."""
    return isinstance(_behind_forward(module), _Block) or dynamo.compiled_by_itself(module)


def has_graph(module: nn.Module) -> bool:
    """Return whether the compiled forward of ``module`` has run as a graph, now or in an earlier fit."""
    group = _behind_forward(module).group
    return bool(group.proven) or any(frame.has_graph for frame in group.frames)


def _behind_forward(module: nn.Module) -> Any:
    """Return the object whose method replaces the forward of ``module``, or None."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), "__self__", None)


def refuse_compiled(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise if ``model`` compiles one of ``blocks`` already.

    Raises:
        ValueError: If a block is, lies in or holds a module that ``torch.compile`` made or whose ``compile()`` was
            called.
    """
    for name in compiled_by_model(model, blocks).values():
        raise ValueError(
            f"{name or type(model).__name__} is compiled by the model itself, with torch.compile() or .compile()."
            " A second compilation would be swallowed by the first, and could be neither reported nor undone."
            " Remove that call and keep Compile, or name blocks outside: Compile(blocks=[...])."
        )


def compiled_by_model(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return which of ``blocks`` the ``model`` compiles itself in whole or in part, each with what is compiled."""
    by_itself = {name: module for name, module in model.named_modules() if dynamo.compiled_by_itself(module)}
    return {
        block: name
        for name, module in by_itself.items()
        for block, chosen in blocks.items()
        if module in {*chosen.modules()} or chosen in {*module.modules()}
    }


class Compiled:
    """What became of the blocks of one ``compiled``.

    Args:
        compiler: How they are compiled.
        on_failure: What a block does that does not compile.
        trial: Whether graphs are tried. Set it to False once training relies on them.
        max_recompiles: How many recompilations are not worth telling.
        tell: Called with what the user should know.
    """

    def __init__(
        self, compiler: Compiler, *, on_failure: OnFailure, trial: bool, max_recompiles: int, tell: Tell
    ) -> None:
        self.compiler, self.on_failure, self.trial = compiler, on_failure, trial and not compiler.cuda_graphs
        self.max_recompiles, self._tell = max_recompiles, tell
        self.copied_bytes = 0
        self.replay: Replay | None = None
        self.gradients: OwnGradients | None = None
        self._is_off = False
        self.backwards: Backwards | None = None
        self.told: list[str] = []
        self._groups: dict[Frame, Group] = {}
        self.only_losses = False
        self.recomputed: set[str] = set()
        self.parts_of: Callable[[str], Mapping[str, nn.Module]] | None = None
        self.clock: Clock | None = None
        self.note: Tell = lambda _: None
        self.advice = ""
        self.only_loss: Container[str] = ()
        self.in_step: Callable[[], bool] = lambda: True
        self.losses: set[str] = set()
        self.undo = ExitStack()
        self._replaced: dict[str, tuple[nn.Module, Callable[..., Any], ExitStack]] = {}
        self._any_ran = False
        self.unchecked = True  # something ran for the first time, or was compiled, since the last check
        self._has_failed = False  # since the last check
        self.paused = False  # all blocks run uncompiled for now
        self.on_news: Callable[[], None] = _ignore

    @property
    def groups(self) -> list[Group]:
        """The blocks, those together that share a frame."""
        return [group for group in self._groups.values() if group.blocks]

    @property
    def facts(self) -> dict[str, Any]:
        """What became of all blocks, as values that JSON knows."""
        # Blocks that are trained in frames of their own may be evaluated in one.
        once = {frame: group for group in reversed(self.groups) for frame in group.frames}
        each = [group.facts_of([frame]) for frame, group in once.items()]
        return {
            "groups": [group.facts for group in self.groups],
            "graphs": sum(facts["graphs"] for facts in each),
            "new_graphs": sum(facts["new_graphs"] for facts in each),
            "breaks": sum(sum(facts["breaks"].values()) for facts in each),
            "recompiles": sum(sum(facts["recompiles"].values()) for facts in each),
            "eager": [name for group in self.groups if group.eager for name in group.blocks],
            "told": [*self.told],
        }

    def tell(self, text: str) -> None:
        """Let the user know, and keep it."""
        self.told.append(text)
        self._tell(text)

    def check(self) -> None:
        """Raise if a block ran and is not compiled.

        Raises:
            RuntimeError: If so, unless a warning said so when it failed; with ``on_failure="eager"`` this warns.
        """
        if not self.unchecked:
            return
        if self._has_failed:
            gc.collect()  # the frames of an error hold activations, and are in cycles
            self._has_failed = False
        for group in self.groups:
            # What a block does in training counts; in evaluation it may do nothing, as one that only adds noise.
            trained = "training" in group.ran
            frames = [group.frame] if trained else group.frames
            proven = "training" in group.proven if trained else bool(group.proven)
            if group.ran and not (proven or group.eager or any(frame.has_graph for frame in frames)):
                failures = [failure for frame in frames for failure in frame.failures]
                breaks = [f"graph break: {reason}" for frame in frames for reason in frame.breaks]
                why = "; ".join(dict.fromkeys(failures or breaks)) or "Dynamo skipped it without a word"
                if self.on_failure == "raise":
                    raise RuntimeError(
                        f"{group} ran and has no graph: {why}."
                        f" {self._without_a_graph(group)}, or let this one be with Compile(on_failure='eager')."
                    )
                self.leave_uncompiled(group, "training" if trained else "evaluation", why)
            in_graphs = trained and "training" not in group.eager
            if in_graphs and "evaluation" in group.ran - group.proven - group.eager.keys():
                self._tell_of_evaluation(group)
            group.proven |= group.ran
            if in_graphs and group.frame.graphs == group.frame.small_graphs > 0:
                why = "too small to gain, which scope='model' compiles anyway"
                if any(frame.breaks for frame in frames):  # as where a forward returns an object with methods
                    why = (
                        "next to nothing lies within its forward. Compile(scope='auto', training_step=True) compiles"
                        " the step, if that is faster"
                    )
                group.eager = dict.fromkeys(get_args(Phase), why)
            if len(group.eager) == len(get_args(Phase)):
                self._restore_forwards(group)
        self.unchecked = False

    def tell_news(self) -> None:
        """Request another `check`, since something has changed."""
        self.unchecked = True
        self.on_news()

    def note_failure(self) -> None:
        """Record that an error was caught in this step."""
        self._has_failed = True

    def _restore_forwards(self, group: Group) -> None:
        """Give the blocks of ``group`` their own forwards back, unless something has replaced ours since."""
        for name in self._replaced.keys() & {*group.blocks}:  # not those of TorchScript
            module, ours, undo = self._replaced[name]
            if vars(module).get("forward") is ours:
                undo.close()

    def _without_a_graph(self, group: Group) -> str:
        if self.recomputed.isdisjoint(group.blocks):
            return (
                "It runs as without Compile, and torch.compile says so only with fullgraph=True."
                " Name other blocks with Compile(blocks=[...])"
            )
        return (
            "ActivationCheckpoint recomputes it, and what is recomputed is compiled without a break or not at all."
            " Name other blocks with Compile(blocks=[...]), leave ActivationCheckpoint out, without which it may be"
            " compiled in parts"
        )

    def leave_uncompiled(self, group: Group, phase: Phase, why: str) -> None:
        """Let the blocks of ``group`` run as they are from now on, compile the blocks within them, and say so."""
        group.eager |= dict.fromkeys(get_args(Phase) if phase == "training" else (phase,), why)
        self.tell_news()
        parts = {}
        if phase == "training" and self.parts_of is not None:
            parts = {name: part for block in group.blocks for name, part in self.parts_of(block).items()}
            self.replace(parts)
        instead = f"the {len(parts)} blocks within it are compiled instead" if parts else "the rest stays compiled"
        advice = self.advice if phase == "training" else ""
        self.tell_of(group, f"{group} runs uncompiled in {phase}, and {instead}: {why.rstrip('.')}.{advice}")

    def tell_of(self, group: Group, text: str) -> None:
        """Let the user know of ``group``: by a line if it is a loss, which nobody asked to compile."""
        if self.losses.issuperset(group.blocks):
            self.note(text)
        else:
            self.tell(f"Compile: {text}")

    @property
    def measures(self) -> bool:
        """Whether blocks are to be timed compiled and uncompiled: after the first step, while nothing is replayed."""
        is_launched = self.replay is None or self.replay.idle or self.replay.paused
        return self.clock is not None and not self.trial and is_launched

    def settles(self, group: Group) -> bool:
        """Return whether nothing is left to be seen or done around calls of ``group``."""
        if self.trial or self.compiler.cuda_graphs or self.backwards is not None:
            return False
        if (self.clock is not None and group.is_unmeasured) or (self.replay is not None and not self.replay.is_over):
            return False
        return not (torch.distributed.is_available() and torch.distributed.is_initialized())  # inputs may be late

    def ways(self, *, waits: bool) -> list[str] | None:
        """Return the ways to run a step that are to be compared as a whole, or None if it is too early to tell.

        Args:
            waits: Whether to wait until each block has run again and is measured.
        """
        replays = self.replay is not None and self.replay.active
        compiled = [group for group in self.groups if "training" in group.ran and "training" not in group.eager]
        if self.trial or (self.replay is not None and self.replay.is_undecided):
            return None
        if waits and (self.unchecked or (self.measures and any(group.is_unmeasured for group in compiled))):
            return None
        ways = ["compiled", "with CUDA graphs"] if replays else ["compiled"]
        # A model that breaks into parts may not gain by compilation. And CUDA graphs may take as much memory as a step
        # that runs uncompiled.
        in_doubt = any(group.gains_little or any(frame.breaks for frame in group.frames) for group in compiled)
        if (in_doubt or replays) and self.clock is not None and self.has_room and not self.recomputed:
            ways.insert(0, "uncompiled")
        return ways

    @property
    def has_room(self) -> bool:
        """Whether a step may take twice the memory that it has taken so far."""
        return self.clock is None or self.clock.room() > 2 * self.clock.peak()

    @property
    def operators(self) -> int:
        """The number of operators in the graphs of all blocks that are compiled in training."""
        compiled = [group for group in self.groups if "training" not in group.eager]
        return sum(len(group.blocks) * group.frame.operators for group in compiled)

    @property
    def spared(self) -> int:
        """The bytes that a step is expected to take less than uncompiled, by what was measured of the blocks."""
        gains = [(group.gain, len(group.blocks)) for group in self.groups if group.gain is not None]
        return max(0, sum(number * (gain.eager_bytes - gain.compiled_bytes) for gain, number in gains))

    def leave_all(self, why: str) -> None:
        """Compile nothing from now on. No block has run in training yet."""
        for group in self.groups:
            group.eager = dict.fromkeys(get_args(Phase), why)
            self._restore_forwards(group)
        self._is_off, self.unchecked = True, False

    def settle(self, contest: Contest) -> None:
        """Run steps in the way that has won from now on."""
        self.paused = False
        if self.replay is not None:
            self.replay.paused = False
            if self.replay.active and contest.winner != "with CUDA graphs":
                self.replay.leave(f"a step takes {contest}")
            elif self.replay.active and not self.replay.has_recorded:  # as after an unfreeze meanwhile
                self.replay.choose_anew("the model runs other graphs than in the steps that were measured")
                return
        if contest.winner == "uncompiled":
            for group in self.groups:
                group.eager = dict.fromkeys(get_args(Phase), f"a step takes {contest}")
            self.note(f"nothing stays compiled, since a step takes {contest}")
            self.tell_news()
        elif self.replay is None or not self.replay.active:
            self.leave_losses()

    def leave_if_slower(
        self, block: "_Block", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Let the blocks of a group run uncompiled if ``block``, one of them, is faster so in this call."""
        assert self.clock is not None
        group = block.group
        group.measurements += 1
        eager = only_loss(block.inner) if block.returns_loss else block.inner
        with calling(block):
            gain = gain_of(module, group.frame.run, eager, args, kwargs, clock=self.clock)
        if gain is None:
            return
        group.gain = gain
        if self.replay is None or self.replay.idle:  # else whole steps are compared first
            self.leave_losses()

    def leave_losses(self) -> None:
        """Let blocks run uncompiled if they were measured to be faster so; call it where nothing is replayed."""
        for group in self.groups:
            if group.gain is not None and group.gain.is_loss and not group.eager:
                group.eager = dict.fromkeys(get_args(Phase), str(group.gain))
                self.tell_news()
                self.note(f"{group} runs uncompiled from now on: {group.gain}")

    def _tell_of_evaluation(self, group: Group) -> None:
        frames = [*group.evaluation.values()]
        why = "; ".join(dict.fromkeys(failure for frame in frames for failure in frame.failures))
        if why and not any(frame.has_graph for frame in frames):  # else it may have nothing to do
            self.tell(
                f"{group} runs uncompiled in evaluation: {why}."
                " In training it is compiled, and nothing of that changes."
                " Change what evaluation does where its speed matters."
            )

    def begin(self) -> None:
        """Called when a training step begins. Blocks that ran earlier, as in an evaluation, do not count."""
        self._any_ran = False

    def note_run(self, *, is_loss: bool) -> None:
        """Record that a block runs. A loss does not count, unless only losses are compiled."""
        self._any_ran = self._any_ran or self.only_losses or not is_loss

    def check_ran(self) -> None:
        """Raise if no block has run since the step began.

        Raises:
            RuntimeError: If so, with ``on_failure="raise"``; otherwise this only warns.
        """
        if not self.groups:
            return  # nothing could be replaced, and a warning said so
        if not self._any_ran and self.on_failure == "eager":
            names = ", ".join([name for group in self.groups for name in group.blocks][:8])
            self.tell(f"Compile: nothing is compiled, since the first step calls the forward of none of {names}.")
        elif not self._any_ran:
            names = [name for group in self.groups for name in group.blocks]
            raise RuntimeError(
                f"Compile has compiled nothing: none of {', '.join(names[:8])} ran in the first step."
                " A block is compiled when its forward is called, and not for a method of another name."
                " Name blocks that your training_step calls: Compile(blocks=[...])."
            )

    def enter(self) -> bool:
        """Compile what lies within the blocks if no block has run since the step began, and return whether it does.

        A step may call other methods than the forward of a model, such as ``encode`` and ``decode``.
        """
        if self._any_ran or self.on_failure == "raise" or self.parts_of is None:
            return False
        outer = [group for group in self.groups if not self._is_of_losses(group)]
        parts = {
            f"{name}.{inner}": part
            for group in outer
            for name in group.blocks
            if name in self._replaced
            for inner, part in roots(self._replaced[name][0])
        }
        if not parts:
            return False
        for group in outer:
            group.eager = dict.fromkeys(get_args(Phase), "the training step calls other methods than its forward")
            self._restore_forwards(group)
        self.replace(parts)
        self.tell_news()
        return True

    def _is_of_losses(self, group: Group) -> bool:
        return any(self.is_loss(name, self._replaced[name][0]) for name in group.blocks if name in self._replaced)

    def is_loss(self, name: str, module: nn.Module) -> bool:
        """Return whether the block ``name`` computes a loss."""
        return name in self.losses or is_loss(module)

    def replace(self, blocks: Mapping[str, nn.Module]) -> None:
        """Compile the forwards of ``blocks``, as far as they can be replaced."""
        for name, module in ({} if self._is_off else blocks).items():
            try:
                undo = ExitStack()
                ours = undo.enter_context(replaced_forward(module, self.replacing(name, module)))
                self.undo.push(undo)
                self._replaced[name] = module, ours, undo
            except ValueError as error:  # as of TorchScript
                if self.on_failure == "raise":
                    raise
                self.tell(f"Compile: {name} ({type(module).__name__}) runs uncompiled: {first_line(error)}")

    def replacing(self, name: str, module: nn.Module) -> Callable[[Forward], Forward]:
        """Return what makes a compiled forward of the forward of ``module``."""
        return lambda inner: _Block(name, module, inner, run=self).forward

    def frame_of(self, block: "_Block", module: nn.Module, phase: str, *, alone: bool = False) -> Frame:
        """Return the frame of blocks equal to ``block``, or one of its own."""
        # A loss is one operator with one number as its result, which says nothing of the logits that it reads.
        compiler = replace(self.compiler, leaves_small=False) if is_loss(module) else self.compiler
        if block.name in self.losses:
            compiler = replace(compiler, fullgraph=True, draws=False)
        inner = only_loss(block.inner) if block.returns_loss and phase != "evaluation" else block.inner
        return frame_of(inner, module, compiler, name=block.name, alone=alone, phase=phase)

    def join(self, block: "_Block", module: nn.Module) -> Group:
        """Return the group of the blocks that are trained in the same frame as ``block``, with the block in it."""
        frame = block.frames["training"]
        group = self._groups.setdefault(frame, Group(type(module).__name__, frame))
        group.add(block.name, block.frames["evaluation"])
        return group


class _Block:
    def __init__(self, name: str, module: nn.Module, inner: Forward, *, run: Compiled) -> None:
        self.name, self.inner, self._run = name, inner, run
        self.is_loss, self._is_chosen_loss = run.is_loss(name, module), name in run.losses
        self._replay = None if self.is_loss else run.replay  # its logits would be copied into a graph's memory
        self.returns_loss = name in run.only_loss
        self.frames = {phase: run.frame_of(self, module, phase) for phase in get_args(Phase)}
        self.group = run.join(self, module)
        self._frame = self.frames["training"]  # in the present call
        self._apart: Frame | None = None  # for calls beside the one that is replayed
        self._proven: set[Phase] = set()
        self._has_run = False  # a graph, in the present call
        self._calling = calling(self)
        self.is_settled = False  # a call with gradients is as the one before, unless something is compiled in it
        self._recomputed = name in run.recomputed
        self._norms = [m for m in module.modules() if isinstance(m, NormWithStatistics)] if self._recomputed else []

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._run.paused or (self.returns_loss and self._wants_all(module)):
            return self.inner(module, *args, **kwargs)
        # Small modules feel each call of Python here.
        is_settled = self.is_settled and not self.group.eager and torch.is_grad_enabled()
        if not is_settled or torch.compiler.is_compiling():
            return self._unsettled(module, *args, **kwargs)
        frame = self._frame = self.frames["training"]
        start, failure, outputs = dynamo.mark(), None, None
        with self._calling:
            try:
                outputs = frame.run(module, *args, **kwargs)
            except Exception as error:
                if not isinstance(error, GraphError) and not dynamo.is_compiler_error(error, start):
                    raise  # from the model itself
                failure = error
        if dynamo.compiled_since(start):
            self.is_settled = False
            self._learn(module, frame, "training", start)
        if failure is not None:
            self.is_settled = False
            self._give_up(failure, frame, "training", None)
            return self.forward(module, *args, **kwargs)
        return outputs

    def _wants_all(self, module: nn.Module) -> bool:
        return torch.is_grad_enabled() and (dynamo.has_forward_hooks(module) or not self._run.in_step())

    def _unsettled(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        phase = _phase()
        if torch.compiler.is_compiling() or (self.group.eager and phase in self.group.eager):
            return self.inner(module, *args, **kwargs)
        if phase == "evaluation" and dynamo.is_watched():  # as a summary counts what an example needs, before a fit
            return self.inner(module, *args, **kwargs)
        args, kwargs = arrived(args), {name: arrived(value) for name, value in kwargs.items()}
        if self._run.gradients is not None:
            self._run.gradients.take_left()
        apart = False
        if (replay := self._replay) is not None and not replay.idle:
            call = call_of(self.name, module, args, kwargs) if phase == "training" else None
            if call is not None and replay.takes(call):
                done, outputs = replay.run(call, self.frames[phase], module, *args, **kwargs)
                if done:
                    return outputs
            else:
                replay.watch(call)
                apart = call is not None and replay.leaves(call)
        if phase == "training" and self.group.is_unmeasured and self._run.measures:
            start = dynamo.mark()
            self._run.leave_if_slower(self, module, args, kwargs)
            if dynamo.compiled_since(start):
                self._learn(module, self.group.frame, phase, start)
            if self.group.eager:
                return self.inner(module, *args, **kwargs)
        if self.frames[phase].full and self.frames[phase].differ:
            self._leave(module, phase)
        frame = self._frame = self._frame_apart(module) if apart else self.frames[phase]
        kept = State(module) if self._run.on_failure == "eager" and phase not in self._proven else None
        start, failure, outputs = dynamo.mark(), None, None
        self._has_run = False
        with self._calling:
            try:
                with self._saving(module, args, kwargs):
                    outputs = frame.run(module, *args, **kwargs)
            except Exception as error:
                if not isinstance(error, GraphError) and not dynamo.is_compiler_error(error, start):
                    raise  # from the model itself
                failure = error
        if phase not in self.group.ran:
            self.group.ran.add(phase)
            self._run.tell_news()
        self._run.note_run(is_loss=self.is_loss)
        if dynamo.compiled_since(start):
            self._learn(module, frame, phase, start)
        if failure is not None:
            self._give_up(failure, frame, phase, kept)
            return self.forward(module, *args, **kwargs)
        self._proven.add(phase)
        if self._has_run:
            self.group.proven.add(phase)
        saves_as_usual = not (self._norms or self._is_chosen_loss)
        can_settle = self._has_run and phase == "training" and saves_as_usual and not (frame.full and frame.differ)
        self.is_settled = can_settle and self._run.settles(self.group)
        if self._run.backwards is not None and phase == "training":
            self._run.backwards.watch(outputs, (args, kwargs))
        return self._kept(module, outputs) if self._run.compiler.cuda_graphs else outputs

    def _saving(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        if self._norms:  # a recomputed batch norm saves its running statistics, which a second call moves
            return saved_at_any_version(self._statistics())
        if not self._is_chosen_loss or not torch.is_grad_enabled() or in_torch_func():
            return nullcontext()
        # Uncompiled, a loss may save what it made of the logits instead, and a step may write to the logits then.
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return saved_at_any_version([*leaves, *module.buffers()], copies=True)

    def _frame_apart(self, module: nn.Module) -> Frame:
        if self._apart is None:
            self._apart = self._run.frame_of(self, module, "apart")
            self.group.add_apart(self._apart)
        return self._apart

    def _kept(self, module: nn.Module, outputs: Any) -> Any:
        limit = COPIED_BYTES if self.is_loss else self._run.copied_bytes
        if limit and "outputs" not in self.group.told and torch.is_grad_enabled() and size(outputs) > limit:
            self.group.told.add("outputs")
            self._run.tell(
                f"{self.group} returns {size(outputs) / 2**20:.0f} MiB in memory that CUDA graphs write to again in the"
                " next step. Within a step it is right, and what is kept for longer changes in silence."
                " Keep copies: output.clone()."
            )
        return copied(outputs, limit=limit)

    def _learn(self, module: nn.Module, frame: Frame, phase: Phase, start: dynamo.Mark) -> None:
        self._run.tell_news()
        kind = (torch.is_inference_mode_enabled(), module.training)
        frame.learn(start, asker=self.name, kind=kind)
        recompiles = self.group.recompiles(frame)
        if self._is_chosen_loss:
            if len(recompiles) > min(1, self._run.max_recompiles):  # once, for another size
                self._run.leave_uncompiled(
                    self.group, "training", f"each call fails a guard, the last one {recompiles[-1]}"
                )
            return
        what = str(self.group) if phase == "training" else f"{self.group} in evaluation"
        limit, compiler = self._run.max_recompiles, self._run.compiler
        for topic, text in worth_telling(what, frame, recompiles, max_recompiles=limit, compiler=compiler):
            if (phase, topic) not in self.group.told:
                self.group.told.add((phase, topic))
                self._run.tell(text)

    def _give_up(self, failure: Exception, frame: Frame, phase: Phase, kept: State | None) -> None:
        """Make the next call run without the graph that failed, or raise."""
        if frame.full and frame.differ:
            return  # with fullgraph, where Dynamo raises at its limit; the block is about to get a frame of its own
        if frame.full and self._run.compiler.fullgraph and self._run.on_failure == "raise":
            guard = frame.recompiles[-1] if frame.recompiles else "unknown"
            raise RuntimeError(
                f"Compile failed on {self.group}, in {phase}: it has as many graphs as Dynamo allows,"
                f" {frame.num_compiled}, and this call fits none of them; the last guard to fail was: {guard}."
                f" With fullgraph=True it may not run uncompiled. {cure_of(guard, self._run.compiler)}"
            ) from failure
        if _is_cut_off(failure) and self._run.on_failure == "raise":
            raise RuntimeError(
                f"Compile failed on {self.group}, in {phase}: {_reason(failure)}."
                " A run was ended while it compiled, and what it left in the compiler's cache is found there again."
                " Delete that file; the next run compiles it anew."
            ) from failure
        if dynamo.lacks_compiler(str(failure)) and self._run.on_failure == "raise":
            # Whose reason says what to install.
            raise RuntimeError(f"Compile failed on {self.group}, in {phase}: {_reason(failure)}.") from failure
        if self._run.on_failure == "raise":
            raise RuntimeError(
                f"Compile failed on {self.group}, in {phase}: {_reason(failure)}."
                f" Something in it is beyond torch.compile with backend={self._run.compiler.backend!r}, or fails"
                " uncompiled as well. Change it, name other blocks with Compile(blocks=[...]), or let this one run"
                " uncompiled with Compile(on_failure='eager')."
            ) from failure
        if kept is not None:
            kept.put_back()
        self._run.note_failure()
        cure = ", which an interrupted run has left behind: delete that file" if _is_cut_off(failure) else ""
        self._run.leave_uncompiled(self.group, phase, f"{_reason(failure)}{cure}")

    def _leave(self, module: nn.Module, phase: Phase) -> None:
        self.frames[phase] = self._run.frame_of(self, module, phase, alone=True)
        if phase == "training":
            del self.group.evaluation[self.name]
        self.group = self._run.join(self, module)

    # What trial.Caller asks for.

    @property
    def slot(self) -> Slot | None:
        return None

    def takes_slot(self, graph: fx.GraphModule, demand: Demand) -> bool:
        return False

    def made_graph(self, *, from_cache: bool) -> None:
        self._frame.graphs += 1
        self._frame.cache_hits += from_cache

    def left_small_graph(self) -> None:
        self._frame.graphs += 1
        self._frame.small_graphs += 1
        self._has_run = True

    def wants_trial(self) -> bool:
        return self._run.trial

    def wants_again(self, graph: fx.GraphModule) -> bool:
        return self._replay is not None and self._replay.wants_timing(graph)

    def tried(self, graph: fx.GraphModule, rehearsal: Rehearsal) -> None:
        if self._replay is not None and self._replay.wants_timing(graph):
            self._replay.time(graph, rehearsal)

    def may_save(self, written: Tensor) -> bool:
        # What a batch norm computes in training does not depend on its running statistics.
        return not self._recomputed or any(written is each for each in self._statistics())

    def _statistics(self) -> tuple[Tensor, ...]:
        held = [buffer for norm in self._norms for buffer in (norm.running_mean, norm.running_var)]
        return tuple(buffer for buffer in held if buffer is not None)

    def not_tried(self, graph: fx.GraphModule, reason: str) -> None:
        self.group.untried.add(reason)
        if self._replay is not None:
            self._replay.untimed(graph, reason)

    def runs_graph(self, graph: fx.GraphModule) -> None:
        self._has_run = True
        if self._replay is not None:
            self._replay.ran_graph(graph)


def _ignore() -> None:
    pass


def _phase() -> Phase:
    return "training" if torch.is_grad_enabled() else "evaluation"


def _is_cut_off(error: Exception) -> bool:
    return "file too short" in _reason(error)  # the loader's words for a library that was not written to its end


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = lines[: lines.index("")] if "" in lines[1:] else lines
    if any(line.startswith("Explanation:") for line in lines):  # Dynamo's, whose headline says the same
        said = lines[:1]
    # By the model or by an operator: Dynamo's hint says only that it may fail uncompiled as well.
    if raised := re.search(r"raised exception (.*)", str(error)):
        return raised[1].rstrip(" .:") + _place(str(error))
    if raised := re.search(r"with fake tensors: .*: got (\w+)\((['\"])(.*)\2\)", str(error)):
        return f"{raised[1]}: {raised[3].rstrip(' .')}{_place(str(error))}"
    return " ".join(said[:3]).rstrip(" .:") + _place(str(error)) + dynamo.first_hint(str(error)).rstrip(".")


def _place(said: str) -> str:
    """Return where in the user's code it is that Dynamo complains of, if it says so."""
    _, code, traced = said.partition("from user code:")
    places = re.findall(r'File "([^"]*)", line (\d+)', traced) if code else []
    places = [(file, line) for file, line in places if dynamo.is_of_user(file)]
    return f", at {'/'.join(Path(places[-1][0]).parts[-2:])}, line {places[-1][1]}" if places else ""
