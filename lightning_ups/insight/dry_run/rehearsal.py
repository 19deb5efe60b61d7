"""Rehearsing the step of a run that is only described, as Lightning would make it, on a twin of its module."""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ups._compat.lightning.trainer import trainer_of
from lightning_ups._compat.torch.log_levels import only_from
from lightning_ups._compat.torch.rehearsal import NEEDS_VALUES, FakeTensorMode, fake_mode
from lightning_ups.insight.memory import (
    Ledger,
    Phase,
    Play,
    RehearsedMemory,
    Step,
    as_compiled,
    cut_for_one_device,
    fake_batch,
    rehearse,
    step_as_on_cuda,
    twin,
)
from lightning_ups.optim import MasteredOptimizer
from lightning_ups.optim.adamw_step import suits_one_kernel
from lightning_ups.optim.low_bit import make_state_alone
from lightning_ups.order.applier import Context
from lightning_ups.order.policy import policy_of
from lightning_ups.order.precision import PolicyPrecision
from lightning_ups.order.run import Run
from lightning_ups.order.stage import Stage
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.blocks import Blocks, roots, select_blocks, with_losses
from lightning_ups.transforms.casting import cast_around, computing_in_float32, kept_in_float32, matmul_weights, within
from lightning_ups.transforms.kv_cache import without_kv_cache
from lightning_ups.transforms.recompute import recompute
from lightning_ups.transforms.tensor_parallel import plan_of, styles_of

__all__ = ["Change", "OptimizerShare", "Uncountable", "optimizer_share", "rehearse_run"]

Checkpointing = Literal["off", "matmuls", "nothing"]
Compiling = Literal["off", "blocks", "model"]


class Uncountable(RuntimeError):  # noqa: N818  (it is what the user reads)
    """A part of a run cannot be rehearsed; its text says which, why, and what helps."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What of a run is rehearsed otherwise than it is declared. None: as it is.

    Args:
        checkpointing: What blocks that are recomputed keep.
        compiling: What is compiled.
        offloading: Whether what blocks save for backward goes to the host.
        low_bit: Whether the optimizer is torchao's AdamW of eight bits, where nothing is sharded.
    """

    checkpointing: Checkpointing | None = None
    compiling: Compiling | None = None
    offloading: bool | None = None
    low_bit: bool | None = None


class OptimizerShare(NamedTuple):
    """What the optimizers of a run take for each trained parameter, in bytes: always, and besides while they step."""

    state: float
    stepping: float


def rehearse_run(
    run: Run,
    batch: Any,
    *,
    optimizers: Callable[[nn.Module], Any] | None = None,
    change: Change | None = None,
    microbatches: int = 1,
    tensor_parallel: tuple[Any, int] | None = None,
) -> Step:
    """Return what a training step of ``run`` takes of one device, if that has the whole model.

    Under a sharding strategy the twin has parameters of the type that modules compute with, and no optimizer: see
    `optimizer_share`.

    Args:
        run: What is asked for; its module is left as it is.
        batch: What ``training_step`` is given; only shapes and types matter.
        optimizers: Makes the optimizer in place of ``configure_optimizers``.
        change: What is otherwise.
        microbatches: Batches in an optimizer step.
        tensor_parallel: The plan by which matrix products are split, and over how many devices: one of them has the
            step then.

    Raises:
        Uncountable: If something cannot be rehearsed.
    """
    by_itself = not run.module.automatic_optimization
    if by_itself and run.strategy.shards:
        raise Uncountable(
            f"{type(run.module).__name__} optimizes by itself (automatic_optimization=False), and cannot be rehearsed"
            " under a strategy that shards."
            " What is gathered and reduced is counted from one forward and one backward, and it makes its own steps."
            " Measure one step instead: `fit` with fast_dev_run, and MemoryForensics among the callbacks."
        )
    change, mode, ledger = change or Change(), fake_mode(), Ledger()
    with ExitStack() as stack, _explained(run):
        module, masters = _twin(run, mode, stack)
        with mode:
            fakes = run.precision.convert_input(fake_batch(batch, mode=mode))
        _stand_in(module, run)
        stack.enter_context(without_kv_cache(module))
        if tensor_parallel is not None:
            plan, size = tensor_parallel
            styles = styles_of(module, plan=plan_of(module, plan), size=size)
            cut_for_one_device(module, styles=styles, size=size)
        with mode:
            _cast(module, run, stack)
        _recomputed(module, run, change, stack)
        inside = _compiled(module, run, change, ledger, stack)
        memory = RehearsedMemory(ledger)
        if tensor_parallel is None:
            _offloaded(module, run, change, memory, stack)
        play = Play(
            module=module,
            loss=lambda: _loss(module.training_step(fakes, 0)),
            optimizers=lambda: (
                []
                if run.strategy.shards
                else _optimizers(
                    module, optimizers, masters, microbatches, run=run, ledger=ledger, low_bit=bool(change.low_bit)
                )
            ),
            mode=mode,
            masters=[] if masters is None else [*masters.of.values()],
            blocks={name: block for name, block in select_blocks(module, None).items() if block not in inside},
            parts=select_blocks(module, None) if run.strategy.whole_graph else None,
            batch=fakes,
            around_forward=lambda: _autocast(run),
            microbatches=min(microbatches, 2),  # from the second on, each is like the one before
            own_step=partial(_own_step, module, fakes) if by_itself else None,
        )
        return replace(rehearse(play, ledger=ledger), on_host=memory.on_host)


def _own_step(
    module: LightningModule, batch: Any, optimizers: Sequence[Optimizer], begin: Callable[[Phase], None]
) -> None:
    """Run a ``training_step`` that calls ``manual_backward`` and steps ``optimizers`` itself."""

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        begin("backward")
        loss.backward(*args, **kwargs)
        begin("forward")

    def stepping(step: Callable[[], Any]) -> Callable[..., Any]:
        def own(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
            loss = None if closure is None else closure()
            begin("optimizer")
            step()
            begin("forward")
            return loss

        return own

    @contextmanager
    def toggled(optimizer: Optimizer, **_: Any) -> Iterator[None]:
        module.toggle_optimizer(optimizer)
        yield
        module.untoggle_optimizer(optimizer)

    module.trainer.optimizers = [*optimizers]
    given = optimizers[0] if len(optimizers) == 1 else [*optimizers]
    vars(module).update(
        manual_backward=backward,
        optimizers=lambda *_, **__: given,
        lr_schedulers=lambda: SimpleNamespace(step=lambda *_, **__: None),
    )
    with ExitStack() as stack:
        for optimizer in optimizers:
            vars(optimizer).update(
                toggle_model=partial(toggled, optimizer), sync_gradients=lambda *_, **__: nullcontext()
            )
            stack.enter_context(patch.object(optimizer, "step", stepping(optimizer.step)))
        module.training_step(batch, 0)


def optimizer_share(run: Run, *, optimizers: Callable[[nn.Module], Any] | None = None) -> OptimizerShare:
    """Return what the optimizers of ``run`` take, stepping parameters as the module has them.

    Raises:
        Uncountable: If they cannot be rehearsed.
    """
    mode, ledger = fake_mode(), Ledger()
    with _explained(run):
        module = twin(run.module, mode=mode, without=trainer_of(run.module))
        assert isinstance(module, LightningModule)
        _stand_in(module, run)
        play = Play(
            module=module,
            loss=lambda: torch.zeros(()),
            optimizers=lambda: _optimizers(module, optimizers, None, 1, run=run, ledger=ledger),
            mode=mode,
            gradients=True,
        )
        step = rehearse(play, ledger=ledger)
    trained = max(sum(step.trained.values()), 1)
    return OptimizerShare(
        state=step.fixed.of("optimizer state") / trained, stepping=step.peaks["optimizer"].of("temporaries") / trained
    )


@contextmanager
def _explained(run: Run) -> Iterator[None]:
    name = type(run.module).__name__
    try:
        with only_from(logging.CRITICAL, "torch._subclasses.fake_tensor"):  # it logs what it raises
            yield
    except Uncountable:
        raise
    except NEEDS_VALUES as error:
        raise Uncountable(
            f"{name} cannot be rehearsed: {_in_one_line(error)}."
            " Memory is counted on tensors that have shapes and no numbers, and what is done here depends on numbers,"
            " as `.item()`, `nonzero` and a mask used as an index do."
            " Measure one step instead: `fit` with fast_dev_run, and MemoryForensics among the callbacks."
        ) from error
    except Exception as error:
        raise Uncountable(
            f"{name} cannot be rehearsed: {_named(error)}."
            " A step of it was run on tensors without numbers, with a stand-in for the Trainer."
            " Plan with --batch in the form that training_step expects, or measure one step: `fit` with fast_dev_run."
        ) from error


def _in_one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # A module says what it is on many lines, and the reason stands behind them.
    first = f"{lines[0]}...{lines[-1].strip()}" if lines[0].endswith("(") else lines[0]
    return first.rstrip(".")[:300]


def _named(error: BaseException) -> str:
    name, said = type(error).__name__, _in_one_line(error)
    return name if said == name else f"{name}: {said}"


def _twin(run: Run, mode: FakeTensorMode, stack: ExitStack) -> tuple[LightningModule, Any]:
    """Return the twin as the precision would convert it, and its masters, if it has some."""
    precision = run.precision
    dtype = None
    policy = policy_of(precision)
    if run.strategy.shards and policy is not None:
        dtype = None if policy.autocast else policy.param
    elif isinstance(precision, (HalfPrecision, DoublePrecision)):
        dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision.precision, torch.float64)
    module = twin(run.module, mode=mode, dtype=dtype, without=trainer_of(run.module))
    assert isinstance(module, LightningModule)
    module.train()
    if not isinstance(precision, PolicyPrecision):
        return module, None
    with mode:
        return module, _converted(precision, module, run, stack)


def _converted(precision: PolicyPrecision, module: LightningModule, run: Run, stack: ExitStack) -> Any:
    fresh = copy.copy(precision)
    fresh._undo, fresh._masters, fresh._sharded = ExitStack(), None, run.strategy.shards
    fresh.convert_module(module)
    stack.callback(_forget, fresh)
    if (masters := fresh._masters) is not None:
        # It looks for what others have written, by value, at the first steps: there are no values.
        masters.take_over = lambda **_: None  # type: ignore[method-assign]
    return masters


def _forget(precision: PolicyPrecision) -> None:
    precision._undo.pop_all()  # the twin is thrown away as it is


def _stand_in(module: LightningModule, run: Run) -> None:
    """Give ``module`` what a step asks of its Trainer."""
    devices = run.num_devices * run.num_nodes
    trainer = SimpleNamespace(
        estimated_stepping_batches=1000, max_steps=1000, max_epochs=1, num_training_batches=1000, global_step=0,
        current_epoch=0, training=True, validating=False, testing=False, sanity_checking=False, world_size=devices,
        num_devices=run.num_devices, num_nodes=run.num_nodes, global_rank=0, local_rank=0, is_global_zero=True,
        logger=None, loggers=[], callbacks=[*run.callbacks], accumulate_grad_batches=1, gradient_clip_val=None,
        datamodule=None, log_every_n_steps=50, barebones=False, fast_dev_run=False, optimizers=[], is_last_batch=False,
        precision=run.precision.precision,
    )  # fmt: skip
    module.trainer = trainer  # type: ignore[assignment]
    for name in ("log", "log_dict", "print", "clip_gradients"):
        vars(module)[name] = lambda *_, **__: None


def _recomputed(module: LightningModule, run: Run, change: Change, stack: ExitStack) -> None:
    if change.checkpointing is None:
        context = _context(run)
        for step in run.declarations:
            if step.stage is Stage.RECOMPUTE and not _on_host(step):
                stack.enter_context(copy.copy(step).change(module, context))
    elif change.checkpointing != "off":
        stack.enter_context(recompute(select_blocks(module, None).values(), save=change.checkpointing))


def _cast(module: LightningModule, run: Run, stack: ExitStack) -> None:
    """Let what enters and leaves roots be cast, as strategies that shard do it; elsewhere precisions do."""
    policy = policy_of(run.precision)
    if not run.strategy.shards or policy is None or policy.param is None:
        return
    kept = [*kept_in_float32(module, policy.in_float32).values()]
    for parameter in (p for part in kept for p in part.parameters()):
        parameter.data = parameter.data.float() if parameter.dtype is policy.param else parameter.data
    stack.enter_context(computing_in_float32(kept, outputs=None if policy.autocast else policy.param))
    if policy.autocast:
        _lower_products(module, within(kept), policy.param)
        return
    outermost = [root for _, root in roots(module)]
    stack.enter_context(cast_around(outermost, inputs=policy.param, outputs=policy.output, given_as_is=within(kept)))


def _lower_products(module: nn.Module, kept: Collection[nn.Module], dtype: torch.dtype) -> None:
    """Give the weights of products the type in which they are gathered."""
    for owner, name in matmul_weights(module):
        if (holder := module.get_submodule(owner)) not in kept:
            parameter = getattr(holder, name)
            parameter.data = parameter.data.to(dtype)


def _offloaded(module: LightningModule, run: Run, change: Change, memory: RehearsedMemory, stack: ExitStack) -> None:
    if change.offloading is None:
        for step in run.declarations:
            if step.moves_saved:
                stack.enter_context(copy.copy(step).change(module, _context(run, memory)))
    elif change.offloading:
        blocks = select_blocks(module, None).values()
        stack.enter_context(offload_activations(blocks, memory=memory, device=memory.device))


def _context(run: Run, memory: RehearsedMemory | None = None) -> Context:
    return Context(device=torch.device("cpu"), mesh=None, training=True, precision=run.precision, memory=memory)


def _on_host(step: Any) -> bool:
    return bool(getattr(step, "host_resident", None))


def _compiled(
    module: LightningModule, run: Run, change: Change, ledger: Ledger, stack: ExitStack
) -> frozenset[nn.Module]:
    """Compile what is to be, and return the modules that are inside of others that are compiled."""
    scope, patterns, losses = _scope(run)
    if change.compiling is not None:
        scope, patterns = change.compiling, None
    if scope == "off":
        return frozenset()
    whole = scope == "model"
    blocks = Blocks(dict(roots(module)), origin="roots") if whole else select_blocks(module, patterns)
    chosen = [*(with_losses(module, blocks) if losses else blocks).values()]
    stack.enter_context(as_compiled(chosen, ledger=ledger, reduces=run.strategy.whole_graph))
    outermost = {*chosen}
    return frozenset(inner for each in chosen for inner in each.modules() if inner not in outermost)


def _scope(run: Run) -> tuple[Compiling, Any, bool]:
    if run.strategy.whole_graph:
        return "model", None, False  # with a Compile, and without
    for step in run.declarations:
        if step.stage is Stage.COMPILE:
            scope: Any = getattr(step, "scope", "blocks")
            if scope == "auto" or run.strategy.shards:  # then it is by blocks that weights are gathered
                scope = "blocks" if run.strategy.shards else "model"
            return scope, getattr(step, "blocks", None), getattr(step, "losses", False)
    return "off", None, False


def _autocast(run: Run) -> Any:
    precision = run.precision
    if isinstance(precision, MixedPrecision):
        dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
        # As Lightning opens it: every use of a weight casts it anew.
        return torch.autocast("cpu", dtype=dtype, cache_enabled=False)
    if isinstance(precision, PolicyPrecision):
        casts = precision.policy.autocast or (precision.weights == "autocast" and not run.strategy.shards)
        lowered = casts and precision.policy.param is not None
        return torch.autocast("cpu", dtype=precision.policy.param, cache_enabled=False) if lowered else nullcontext()
    if isinstance(precision, (HalfPrecision, DoublePrecision)):
        return precision.forward_context()
    return nullcontext()


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise Uncountable(
            f"training_step returned {type(output).__name__}, and no loss."
            " What backward takes is counted from the loss."
            " Measure one step instead: `fit` with fast_dev_run, and MemoryForensics among the callbacks."
        )
    return loss


def _optimizers(
    module: LightningModule,
    make: Callable[[nn.Module], Any] | None,
    masters: Any,
    microbatches: int,
    *,
    run: Run,
    ledger: Ledger,
    low_bit: bool = False,
) -> Sequence[Optimizer]:
    made = [*_flattened(make(module) if make is not None else module.configure_optimizers())]
    found = [make_state_alone(optimizer, in_eight_bits=low_bit) for optimizer in made]
    if masters is not None:
        found = [MasteredOptimizer(optimizer, masters, accumulate=microbatches > 1) for optimizer in found]
    for optimizer in found:
        stepped = optimizer.inner if isinstance(optimizer, MasteredOptimizer) else optimizer
        precision = run.precision
        in_one_kernel = isinstance(precision, PolicyPrecision) and precision.may_step_in_one_kernel(run)
        if in_one_kernel and suits_one_kernel(stepped):
            vars(optimizer)["step"] = _counting_nothing(optimizer.step, ledger)
        else:
            step_as_on_cuda(optimizer)
    return found


def _counting_nothing(step: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with ledger.paused():
            return step(*args, **kwargs)

    return uncounted


def _flattened(made: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in whatever ``configure_optimizers`` may return."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from _flattened(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for each in made:
            yield from _flattened(each)
