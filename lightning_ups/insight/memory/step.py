"""Rehearsing a step of training on fake tensors: what it would take of a GPU's memory, when, and for what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.distributions import without_checks
from lightning_ups._compat.torch.rehearsal import FakeTensorMode
from lightning_ups.insight.memory.account import Ledger, Moment, Phase
from lightning_ups.insight.memory.cuda import as_on_cuda
from lightning_ups.transforms.float8 import float8_linears

__all__ = ["Play", "Step", "rehearse"]


@dataclass(frozen=True, kw_only=True)
class Play:
    """What a step consists of. Everything in it lives in the fakes of ``mode``.

    Args:
        module: The module's twin.
        loss: Runs the forward pass of a training step and returns its loss.
        optimizers: Makes the optimizers, over the parameters of the twin.
        mode: What fakes.
        masters: Full-precision parameters beside those of the twin.
        blocks: The submodules to which memory is assigned, by name.
        batch: The batch.
        around_forward: Makes a context for the forward pass, such as autocast.
        before_step: What runs between backward and the optimizer, such as clipping, given an optimizer.
        microbatches: How many batches an optimizer step has.
        gradients: Whether the optimizers find gradients that no backward has made.
        parts: The submodules by which parameters are counted, by name. None: ``blocks``.
        own_step: Runs, in place of ``loss``, a training step that makes its own backward passes and steps of the
            optimizers that it is given; it is given what notes that a phase begins, too.
    """

    module: nn.Module
    loss: Callable[[], Tensor]
    optimizers: Callable[[], Sequence[Optimizer]]
    mode: FakeTensorMode
    masters: Sequence[nn.Parameter] = ()
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    batch: Any = None
    around_forward: Callable[[], Any] = nullcontext
    before_step: Callable[[Optimizer], None] = lambda _: None
    microbatches: int = 1
    gradients: bool = False
    parts: Mapping[str, nn.Module] | None = None
    own_step: Callable[[Sequence[Optimizer], Callable[[Phase], None]], None] | None = None

    @property
    def counted(self) -> Mapping[str, nn.Module]:
        """The submodules by which parameters are counted."""
        return self.blocks if self.parts is None else self.parts


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rehearsed step took.

    Args:
        peaks: For each phase, when it took the most.
        fixed: What there is between two steps; of gradients, what the optimizer leaves.
        loose: For each phase and block, when the most was alive of what is not sharded with the parameters.
        saved: When the forward pass had ended: what is kept for backward.
        elements: The parameters of each block; under the empty name those of no block.
        trained: Those of them that are trained.
        largest: The largest parameter.
        in_float8: Those of ``elements`` that are weights of layers that multiply in float8.
        on_host: Bytes of the host's memory that what is saved for backward takes.
    """

    peaks: Mapping[Phase, Moment]
    fixed: Moment
    loose: Mapping[tuple[Phase, str], Moment]
    saved: Moment
    elements: Mapping[str, int]
    trained: Mapping[str, int]
    largest: int
    in_float8: Mapping[str, int] = field(default_factory=dict)
    on_host: int = 0

    @property
    def peak(self) -> Moment:
        """When it took the most."""
        return max(self.peaks.values(), key=lambda moment: moment.total)


def rehearse(play: Play, *, ledger: Ledger) -> Step:
    """Run two optimizer steps of ``play``, the first to make what optimizers keep, and return what the second takes."""
    with ExitStack() as stack:
        stack.enter_context(play.mode)
        stack.enter_context(without_checks())
        stack.enter_context(_followed(play.blocks, ledger))
        stack.enter_context(ledger)
        optimizers = _set_up(play, ledger)
        stack.enter_context(_gradients_claimed(play, ledger))
        if play.own_step is not None:
            _step_by_itself(play, ledger, optimizers)  # which may free gradients, before and after
        fixed = ledger.now()
        ledger.forget_peaks()
        if play.own_step is not None:
            saved = _step_by_itself(play, ledger, optimizers)
        else:
            saved = _step(play, ledger, optimizers)
    return Step(
        peaks={phase: moment for phase, moment in ledger.peaks.items() if phase != "setup"},
        fixed=fixed,
        loose={key: moment for key, moment in ledger.loose.items() if key[0] in ("forward", "backward")},
        saved=saved,
        elements=_elements(play),
        trained=_elements(play, of=lambda p: p.requires_grad),
        largest=max((p.numel() for p in play.module.parameters()), default=0),
        in_float8=_elements(play, of={m.weight for m in float8_linears(play.module).values()}.__contains__),
    )


def _step(play: Play, ledger: Ledger, optimizers: Sequence[Optimizer]) -> Moment:
    saved = Moment()
    with as_on_cuda():  # in backward too, where blocks are recomputed
        for index in range(play.microbatches):
            saved = _forward_backward(play, ledger, optimizers=optimizers if index == 0 else None)
    if play.gradients:
        _make_gradients(play, ledger)
    ledger.start("optimizer")
    for optimizer in optimizers:
        play.before_step(optimizer)
        optimizer.step()
    return saved


def _step_by_itself(play: Play, ledger: Ledger, optimizers: Sequence[Optimizer]) -> Moment:
    assert play.own_step is not None
    saved = [Moment()]

    def begin(phase: Phase) -> None:
        if phase == "backward":
            saved.append(ledger.now())
        ledger.start(phase)

    begin("forward")
    with as_on_cuda(), play.around_forward():
        play.own_step(optimizers, begin)
    return max(saved, key=lambda moment: moment.total)


def _set_up(play: Play, ledger: Ledger) -> list[Optimizer]:
    for parameter, owner in _owners(play).items():
        ledger.claim([parameter], "parameters", owner)
    ledger.claim(play.module.buffers(), "buffers")
    ledger.claim(play.masters, "master weights")
    ledger.claim((leaf for leaf in tree_leaves(play.batch) if isinstance(leaf, Tensor)), "batch")
    optimizers = [*play.optimizers()]
    _make_gradients(play, ledger)
    for optimizer in optimizers:
        optimizer.step()
        ledger.claim(_state(optimizer), "optimizer state")
    return optimizers  # the gradients stay, as after a step that Lightning has made


def _make_gradients(play: Play, ledger: Ledger) -> None:
    for parameter in play.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            ledger.claim([parameter.grad], "gradients")


def _state(optimizer: Optimizer) -> list[Tensor]:
    return [leaf for state in optimizer.state.values() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def _forward_backward(play: Play, ledger: Ledger, *, optimizers: Sequence[Optimizer] | None) -> Moment:
    ledger.start("forward")
    with play.around_forward():
        loss = play.loss()
    saved = ledger.now()
    if optimizers is not None:  # Lightning frees the gradients of the step before after the first forward pass
        play.module.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
    ledger.start("backward")
    if loss.requires_grad:
        (loss / play.microbatches).backward()
    ledger.claim((m.grad for m in play.masters if m.grad is not None), "gradients")
    return saved


@contextmanager
def _followed(blocks: Mapping[str, nn.Module], ledger: Ledger) -> Iterator[None]:
    """Let ``ledger`` know which block runs: from its call to its return, and from its gradient to the next one's."""
    with ExitStack() as undo:
        for name, block in blocks.items():
            outer: list[str] = []

            def enter(_: nn.Module, _args: Any, *, name: str = name, outer: list[str] = outer) -> None:
                if ledger.phase == "forward":  # in backward it is run a second time
                    outer.append(ledger.place)
                    ledger.start("forward", name)

            def leave(_: nn.Module, _args: Any, output: Any, *, name: str = name, outer: list[str] = outer) -> None:
                if ledger.phase != "forward":
                    return
                ledger.start("forward", outer.pop() if outer else "")
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _, name=name: ledger.start("backward", name))

            undo.callback(block.register_forward_pre_hook(enter).remove)
            undo.callback(block.register_forward_hook(leave).remove)
        yield


@contextmanager
def _gradients_claimed(play: Play, ledger: Ledger) -> Iterator[None]:
    def claim(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.claim([parameter.grad], "gradients", owners.get(parameter, ""))

    owners: dict[Any, str] = _owners(play)
    with ExitStack() as undo:
        for parameter in owners:
            if parameter.requires_grad:
                undo.callback(parameter.register_post_accumulate_grad_hook(claim).remove)
        yield


def _owners(play: Play) -> dict[nn.Parameter, str]:
    owners: dict[nn.Parameter, str] = {}
    for name, block in play.counted.items():
        for parameter in block.parameters():
            owners.setdefault(parameter, name)
    for parameter in play.module.parameters():
        owners.setdefault(parameter, "")
    return owners


def _elements(play: Play, *, of: Callable[[Tensor], bool] = lambda _: True) -> dict[str, int]:
    sums = {"": 0, **dict.fromkeys(play.counted, 0)}
    for parameter, owner in _owners(play).items():
        if of(parameter):
            sums[owner] += parameter.numel()
    return sums
