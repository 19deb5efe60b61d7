"""The memory of a training step on fake tensors: how much it takes of a GPU, when, and for what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.tensors.tensors import local_of
from lightning_ups.insight.memory.account import Ledger, Moment, Phase
from lightning_ups.insight.memory.cuda import as_on_cuda
from lightning_ups.transforms.float8 import float8_linears


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step, all on fake tensors.

    Args:
        module: A copied module.
        loss: Runs the forward pass of a training step and returns its loss.
        optimizers: Creates the optimizers.
        opened: Opens the dry run.
        masters: Full-precision master weights.
        blocks: The submodules to which memory is assigned, by name.
        batch: The batch.
        around_forward: Creates a context for the forward pass, such as autocast.
        microbatches: Batches in an optimizer step.
        gradients: Whether the optimizers get gradients without a backward pass.
        counted: The submodules by which parameters are counted, by name. None: ``blocks``.
    """

    module: nn.Module
    loss: Callable[[], Tensor]
    optimizers: Callable[[], Sequence[Optimizer]]
    opened: Callable[[], AbstractContextManager[Any]]
    masters: Sequence[nn.Parameter] = ()
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    batch: Any = None
    around_forward: Callable[[], Any] = nullcontext
    microbatches: int = 1
    gradients: bool = False
    counted: Mapping[str, nn.Module] | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The memory of a step.

    Args:
        peaks: The largest moment of each phase.
        fixed: What is held between two steps, with the gradients that the optimizer leaves.
        loose: The moment of each phase and block with the most memory that is not sharded with the parameters.
        saved: The end of the forward pass, with all that is saved for backward.
        elements: The parameters of each block; under the empty name those outside of blocks.
        trained: The trained ones of them.
        in_float8: The part of ``elements`` in weights of float8 layers.
        on_host: Bytes of tensors saved for backward on the host.
    """

    peaks: Mapping[Phase, Moment]
    fixed: Moment
    loose: Mapping[tuple[Phase, str], Moment]
    saved: Moment
    elements: Mapping[str, int]
    trained: Mapping[str, int]
    in_float8: Mapping[str, int] = field(default_factory=dict)
    on_host: int = 0

    @property
    def peak(self) -> Moment:
        """The largest moment."""
        return max(self.peaks.values(), key=lambda moment: moment.total)


def measure(parts: StepParts, *, ledger: Ledger) -> Step:
    """Run two optimizer steps, the first to create optimizer state, and return the memory of the second."""
    with parts.opened(), _blocks_followed(parts.blocks, ledger), ledger:
        optimizers = _set_up(parts, ledger)
        with _gradients_claimed(parts, ledger):
            fixed = ledger.now()
            ledger.forget_peaks()
            saved = _step(parts, ledger, optimizers)
    float8_weights = {layer.weight for layer in float8_linears(parts.module).values()}
    return Step(
        peaks={phase: moment for phase, moment in ledger.peaks.items() if phase != "setup"},
        fixed=fixed,
        loose={key: moment for key, moment in ledger.loose.items() if key[0] in ("forward", "backward")},
        saved=saved,
        elements=_elements(parts),
        trained=_elements(parts, of=lambda p: p.requires_grad),
        in_float8=_elements(parts, of=float8_weights.__contains__),
    )


def _step(parts: StepParts, ledger: Ledger, optimizers: Sequence[Optimizer]) -> Moment:
    saved = Moment()
    with as_on_cuda():  # also in backward, where blocks are recomputed
        for index in range(parts.microbatches):
            saved = _forward_backward(parts, ledger, optimizers=optimizers if index == 0 else None)
    if parts.gradients:
        _create_gradients(parts, ledger)
    ledger.start("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    return saved


def _set_up(parts: StepParts, ledger: Ledger) -> list[Optimizer]:
    for parameter, owner in _owners(parts).items():
        ledger.claim([parameter], "parameters", owner)
    ledger.claim(parts.module.buffers(), "buffers")
    ledger.claim(parts.masters, "master weights")
    ledger.claim(_tensors(parts.batch), "batch")
    optimizers = [*parts.optimizers()]
    _create_gradients(parts, ledger)
    for optimizer in optimizers:
        optimizer.step()
        ledger.claim(_tensors([*optimizer.state.values()]), "optimizer state")
    return optimizers  # the gradients stay, as after a step of Lightning's


def _create_gradients(parts: StepParts, ledger: Ledger) -> None:
    for parameter in parts.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            ledger.claim([parameter.grad], "gradients")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _forward_backward(parts: StepParts, ledger: Ledger, *, optimizers: Sequence[Optimizer] | None) -> Moment:
    ledger.start("forward")
    with parts.around_forward():
        loss = parts.loss()
    saved = ledger.now()
    if optimizers is not None:  # Lightning frees the gradients of the previous step after the first forward pass
        parts.module.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
    ledger.start("backward")
    if loss.requires_grad:
        (loss / parts.microbatches).backward()
    ledger.claim((m.grad for m in parts.masters if m.grad is not None), "gradients")
    return saved


@contextmanager
def _blocks_followed(blocks: Mapping[str, nn.Module], ledger: Ledger) -> Iterator[None]:
    """Tell ``ledger`` which block runs: in forward until it returns, in backward until another one's gradient."""
    with ExitStack() as undo:
        for name, block in blocks.items():
            outer: list[str] = []

            def enter(_: nn.Module, _args: Any, *, name: str = name, outer: list[str] = outer) -> None:
                if ledger.phase == "forward":  # in backward it is recomputed
                    outer.append(ledger.place)
                    ledger.start("forward", name)

            def leave(_: nn.Module, _args: Any, output: Any, *, name: str = name, outer: list[str] = outer) -> None:
                if ledger.phase != "forward":
                    return
                ledger.start("forward", outer.pop() if outer else "")
                for leaf in _tensors(output):
                    if leaf.requires_grad:
                        leaf.register_hook(lambda _, name=name: ledger.start("backward", name))

            undo.callback(block.register_forward_pre_hook(enter).remove)
            undo.callback(block.register_forward_hook(leave).remove)
        yield


@contextmanager
def _gradients_claimed(parts: StepParts, ledger: Ledger) -> Iterator[None]:
    def claim(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.claim([parameter.grad], "gradients", owners.get(parameter, ""))

    owners: dict[Any, str] = _owners(parts)
    with ExitStack() as undo:
        for parameter in owners:
            if parameter.requires_grad:
                undo.callback(parameter.register_post_accumulate_grad_hook(claim).remove)
        yield


def _counted(parts: StepParts) -> Mapping[str, nn.Module]:
    return parts.blocks if parts.counted is None else parts.counted


def _owners(parts: StepParts) -> dict[nn.Parameter, str]:
    owners: dict[nn.Parameter, str] = {}
    for name, block in _counted(parts).items():
        for parameter in block.parameters():
            owners.setdefault(parameter, name)
    for parameter in parts.module.parameters():
        owners.setdefault(parameter, "")
    return owners


def _elements(parts: StepParts, *, of: Callable[[Tensor], bool] = lambda _: True) -> dict[str, int]:
    sums = {"": 0, **dict.fromkeys(_counted(parts), 0)}
    for parameter, owner in _owners(parts).items():
        if of(parameter):
            sums[owner] += local_of(parameter).numel()  # of one device with tensor parallelism
    return sums
