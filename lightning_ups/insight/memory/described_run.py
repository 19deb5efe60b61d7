"""The memory of a training step of a run that is only described: a dry run with everything that the run declares."""

import copy
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.fit_setup import optimizers_of
from lightning_ups._compat.torch.fake_tensors import NEEDS_VALUES, FakeTensor, fake_mesh, fake_mode
from lightning_ups.insight.dry_run import DryRun, FakeCopies, call_training_step, loss_in
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.insight.memory.compiled import as_compiled
from lightning_ups.insight.memory.cuda import step_as_on_cuda
from lightning_ups.insight.memory.step import Step, StepParts, measure
from lightning_ups.optim import MasteredOptimizer
from lightning_ups.optim.adamw_step import suits_one_kernel
from lightning_ups.optim.low_bit import make_state_alone
from lightning_ups.optim.offload import Copy, Mark, Memory
from lightning_ups.order.capabilities import policy_of
from lightning_ups.order.precision import PolicyPrecision
from lightning_ups.order.run import Context, Run, Stage
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.blocks import Blocks, roots, select_blocks, with_losses
from lightning_ups.transforms.casting import cast_around, computing_in_float32, kept_in_float32, matmul_weights, within
from lightning_ups.transforms.kv_cache import without_kv_cache
from lightning_ups.transforms.recompute import recompute
from lightning_ups.transforms.tensor_parallel import parallelize, plan_of

Checkpointing = Literal["off", "matmuls", "nothing"]
Compiling = Literal["off", "blocks", "model"]
MEASURE = "Measure instead: `fit` with max_steps=20 and TokenThroughput prints the peak memory of the GPU."


class Uncountable(RuntimeError):  # noqa: N818  (users read the name)
    """The memory of a run cannot be counted in a dry run. The text says why, and what helps."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that replace those of the run. None: unchanged.

    Args:
        checkpointing: What recomputed blocks keep.
        compiling: What is compiled.
        offloading: Whether tensors that blocks save for backward go to the host.
        low_bit: Whether the optimizer is torchao's 8-bit AdamW, without sharding.
    """

    checkpointing: Checkpointing | None = None
    compiling: Compiling | None = None
    offloading: bool | None = None
    low_bit: bool | None = None


class OptimizerShare(NamedTuple):
    """Bytes of the optimizers for each trained parameter: always, and in addition during their step."""

    state: float
    stepping: float


class HostMemory(Memory):
    """Holds fake tensors: copies nothing, and counts what is on the device in ``ledger``.

    Attributes:
        used: Bytes of the host's memory, at most.
    """

    moves = FakeTensor

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(torch.device("cpu"))  # the device of all fake tensors
        self.used = 0
        self._ledger = ledger
        self._owners: dict[int, str] = {}  # of the activation in each storage

    @override
    def host(self, nbytes: int) -> Tensor:
        with self._ledger.paused():
            memory = super().host(nbytes)
        self._ledger.leave_out(memory)
        self.used += nbytes
        return memory

    @override
    def store(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        for to, source in copies:
            self._owners[_storage(to)] = self._ledger.owner_of(source, "activations") or ""

    @override
    def load(self, copies: Iterable[Copy], *, after: Sequence[Mark] = ()) -> Mark:
        for to, source in copies:
            self._ledger.claim([to], "activations", self._owners[_storage(source)])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measure_run(
    run: Run,
    batch: Any,
    *,
    optimizers: Callable[[nn.Module], Any] | None = None,
    change: Change | None = None,
    microbatches: int = 1,
) -> Step:
    """Return the memory of a training step of ``run`` on one device that has the unsharded model.

    Under a sharding strategy the parameters have the dtype in which modules compute, and there is no optimizer: see
    `optimizer_share`.

    Args:
        run: Its module is not changed.
        batch: The argument of ``training_step``; only shapes and dtypes matter.
        optimizers: Creates the optimizer in place of ``configure_optimizers``.
        change: Settings that replace those of the run.
        microbatches: Batches in an optimizer step.

    Raises:
        Uncountable: If it cannot run on fake tensors.
    """
    if not run.module.automatic_optimization:
        raise Uncountable(f"{type(run.module).__name__} uses manual optimization, which cannot be planned. {MEASURE}")
    change, ledger = change or Change(), Ledger()
    with ExitStack() as stack, _errors_explained(run):
        dry_run = _dry_run(run, batch, dtype=_parameter_dtype(run))
        module = dry_run.module
        module.train()
        with dry_run.opened():
            masters = _convert(module, run, stack)
            batch = run.precision.convert_input(dry_run.batch)
        stack.enter_context(without_kv_cache(module))
        with dry_run.opened():
            _cast(module, run, stack)
        _split(module, run, dry_run, stack)
        _recompute(module, run, change, stack)
        compiled = _compile(module, run, change, ledger, stack)
        host = HostMemory(ledger)
        _offload(module, run, change, host, stack)
        make = partial(_make_optimizers, module, optimizers, run=run, ledger=ledger)
        parts = StepParts(
            module=module,
            loss=lambda: _loss(module, batch),
            optimizers=lambda: [] if run.strategy.shards else make(masters, microbatches, low_bit=bool(change.low_bit)),
            opened=dry_run.opened,
            masters=[] if masters is None else [*masters.of.values()],
            blocks={name: block for name, block in select_blocks(module, None).items() if block not in compiled},
            counted=select_blocks(module, None) if run.strategy.whole_graph else None,
            batch=batch,
            around_forward=lambda: _autocast(run),
            microbatches=min(microbatches, 2),  # a third one is like the second
        )
        return replace(measure(parts, ledger=ledger), on_host=host.used)


def optimizer_share(run: Run, *, optimizers: Callable[[nn.Module], Any] | None = None) -> OptimizerShare:
    """Return the memory of the optimizers of ``run`` for each trained parameter, in the dtypes of the module.

    Raises:
        Uncountable: If they cannot run on fake tensors.
    """
    ledger = Ledger()
    with _errors_explained(run):
        dry_run = _dry_run(run, None, dtype=None)
        parts = StepParts(
            module=dry_run.module,
            loss=lambda: torch.zeros(()),
            optimizers=lambda: _make_optimizers(dry_run.module, optimizers, None, 1, run=run, ledger=ledger),
            opened=dry_run.opened,
            gradients=True,
        )
        step = measure(parts, ledger=ledger)
    trained = max(sum(step.trained.values()), 1)
    return OptimizerShare(
        state=step.fixed.of("optimizer state") / trained, stepping=step.peaks["optimizer"].of("temporaries") / trained
    )


def _dry_run(run: Run, batch: Any, *, dtype: torch.dtype | None) -> DryRun:
    if any(isinstance(parameter, DTensor) for parameter in run.module.parameters()):
        raise Uncountable(
            f"{type(run.module).__name__} is already sharded, and a plan starts from the module as it was built."
            " Plan with a module that has not been given to a strategy."
        )
    return DryRun(
        run.module,
        batch,
        copies=FakeCopies(mode=fake_mode(), dtype=dtype),
        callbacks=[*run.callbacks],
        num_devices=run.num_devices,
        num_nodes=run.num_nodes,
        precision=run.precision.precision,
        world_size=run.num_devices * run.num_nodes,
    )


@contextmanager
def _errors_explained(run: Run) -> Iterator[None]:
    name = type(run.module).__name__
    try:
        yield
    except Uncountable:
        raise
    except NEEDS_VALUES as error:
        raise Uncountable(
            f"{name}.training_step depends on values{_users_line(error)}: {_in_one_line(error)}. Memory is counted on"
            " tensors without values. Log tensors without `.item()`, compute metrics in Metric objects of torchmetrics,"
            f" and use torch.where in place of boolean indices. {MEASURE}"
        ) from error
    except Exception as error:
        reason = _in_one_line(error)
        reason = reason if reason == type(error).__name__ else f"{type(error).__name__}: {reason}"
        raise Uncountable(
            f"{name} failed in a dry run, on fake tensors and with a stand-in for the Trainer: {reason}."
            f" If training_step expects another batch, give its shapes by --batch. {MEASURE}"
        ) from error


def _users_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of ``error``."""
    package = __name__.partition(".")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not {"site-packages", package} & {*path.parts}:
            return f" at {path.name}:{frame.lineno}, `{frame.line}`"
    return ""


def _in_one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The description of a module has many lines, and the reason comes last.
    first = f"{lines[0]}...{lines[-1].strip()}" if lines[0].endswith("(") else lines[0]
    return shorten(first, 300, placeholder=" ...").rstrip(".")


# What the run declares


def _parameter_dtype(run: Run) -> torch.dtype | None:
    precision, policy = run.precision, policy_of(run.precision)
    if run.strategy.shards and policy is not None:
        return None if policy.autocast else policy.param
    if isinstance(precision, (HalfPrecision, DoublePrecision)):
        return {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision.precision, torch.float64)
    return None


def _convert(module: LightningModule, run: Run, stack: ExitStack) -> Any:
    """Convert ``module`` as the precision does, and return its master weights, if it has some."""
    if not isinstance(run.precision, PolicyPrecision):
        return None
    precision: Any = run.precision.as_new(sharded=run.strategy.shards)
    if hasattr(precision, "filter"):
        precision.filter = "all"  # "auto" times layers on the GPU of the run
    stand_in, module._trainer = module._trainer, None  # precisions ask a Trainer for its device
    precision.convert_module(module)
    module._trainer = stand_in
    stack.callback(lambda: precision._undo.pop_all())  # the copy is thrown away, converted
    if (masters := precision.master_weights) is not None:
        masters.take_over = lambda **_: None  # type: ignore[method-assign]  # it compares values
    return masters


def _cast(module: LightningModule, run: Run, stack: ExitStack) -> None:
    """Cast the inputs and outputs of roots, which is the strategy's part if it shards, and else the precision's."""
    policy = policy_of(run.precision)
    if not run.strategy.shards or policy is None or policy.param is None:
        return
    kept = [*kept_in_float32(module, policy.in_float32).values()]
    for parameter in (p for part in kept for p in part.parameters()):
        parameter.data = parameter.data.float() if parameter.dtype is policy.param else parameter.data
    stack.enter_context(computing_in_float32(kept, outputs=None if policy.autocast else policy.param))
    if policy.autocast:
        _cast_matmul_weights(module, within(kept), policy.param)
        return
    outermost = [root for _, root in roots(module)]
    stack.enter_context(cast_around(outermost, inputs=policy.param, outputs=policy.output, given_as_is=within(kept)))


def _cast_matmul_weights(module: LightningModule, kept: Collection[nn.Module], dtype: torch.dtype) -> None:
    """Give the weights of matrix products the dtype in which they are gathered."""
    for owner, name in matmul_weights(module):
        if (holder := module.get_submodule(owner)) not in kept:
            parameter = getattr(holder, name)
            parameter.data = parameter.data.to(dtype)


def _split(module: LightningModule, run: Run, dry_run: DryRun, stack: ExitStack) -> None:
    """Split products over devices that do not exist, as the strategy does with tensor parallelism."""
    settings = run.strategy.settings
    if (size := settings.get("tensor_parallel_size") or 1) > 1:
        if dist.is_initialized():
            raise Uncountable(
                f"{run.strategy.name}(tensor_parallel_size={size}) cannot be planned while it runs: this process has a"
                " process group. Use `python -m lightning_ups plan`."
            )
        mesh = stack.enter_context(fake_mesh(size))
        with dry_run.opened():
            parallelize(module, plan=plan_of(module, settings["tensor_parallel_plan"]), mesh=mesh)


def _recompute(module: LightningModule, run: Run, change: Change, stack: ExitStack) -> None:
    if change.checkpointing is None:
        for step in run.declarations:
            if step.stage is Stage.RECOMPUTE and not getattr(step, "host_resident", None):
                stack.enter_context(copy.copy(step).change(module, _context(run)))
    elif change.checkpointing != "off":
        stack.enter_context(recompute(select_blocks(module, None).values(), save=change.checkpointing))


def _offload(module: LightningModule, run: Run, change: Change, host: HostMemory, stack: ExitStack) -> None:
    if change.offloading is None:
        for step in run.declarations:
            if step.moves_saved:
                stack.enter_context(copy.copy(step).change(module, _context(run, host)))
    elif change.offloading:
        blocks = select_blocks(module, None).values()
        stack.enter_context(offload_activations(blocks, memory=host, device=host.device))


def _context(run: Run, memory: HostMemory | None = None) -> Context:
    return Context(device=torch.device("cpu"), mesh=None, training=True, precision=run.precision, memory=memory)


def _compile(
    module: LightningModule, run: Run, change: Change, ledger: Ledger, stack: ExitStack
) -> frozenset[nn.Module]:
    """Compile what the run compiles, and return the modules inside of compiled ones."""
    scope, patterns, losses = _compiled_scope(run)
    if change.compiling is not None:
        scope, patterns = change.compiling, None
    if scope == "off":
        return frozenset()
    blocks = Blocks(dict(roots(module)), origin="roots") if scope == "model" else select_blocks(module, patterns)
    chosen = {*(with_losses(module, blocks) if losses else blocks).values()}
    stack.enter_context(as_compiled(chosen, ledger=ledger, reduces=run.strategy.whole_graph))
    return frozenset(inner for each in chosen for inner in each.modules() if inner not in chosen)


def _compiled_scope(run: Run) -> tuple[Compiling, Any, bool]:
    if run.strategy.whole_graph:
        return "model", None, False  # with and without Compile
    for step in run.declarations:
        if step.stage is Stage.COMPILE:
            scope: Any = getattr(step, "scope", "blocks")
            if scope == "auto" or run.strategy.shards:  # weights are gathered by blocks
                scope = "blocks" if run.strategy.shards else "model"
            return scope, getattr(step, "blocks", None), getattr(step, "losses", False)
    return "off", None, False


def _autocast(run: Run) -> AbstractContextManager[Any]:
    precision, dtype = run.precision, None
    if isinstance(precision, MixedPrecision):
        dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
    elif isinstance(precision, PolicyPrecision):
        casts = precision.policy.autocast or (precision.weights == "autocast" and not run.strategy.shards)
        dtype = precision.policy.param if casts else None
    elif isinstance(precision, (HalfPrecision, DoublePrecision)):
        return precision.forward_context()
    # Without a cache, as Lightning opens it: each use of a weight casts it again.
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)


# The step


def _loss(module: LightningModule, batch: Any) -> Tensor:
    output = call_training_step(module, batch)
    if (loss := loss_in(output)) is None:
        raise Uncountable(
            f"{type(module).__name__}.training_step returned {type(output).__name__} instead of a loss, so that the"
            f" memory of backward is unknown. {MEASURE}"
        )
    return loss


def _make_optimizers(
    module: LightningModule,
    make: Callable[[nn.Module], Any] | None,
    masters: Any,
    microbatches: int,
    *,
    run: Run,
    ledger: Ledger,
    low_bit: bool = False,
) -> Sequence[Optimizer]:
    configured, _ = optimizers_of(make(module) if make is not None else module.configure_optimizers())
    found: list[Any] = [make_state_alone(optimizer, in_eight_bits=low_bit) for optimizer in configured]
    if masters is not None:
        found = [MasteredOptimizer(optimizer, masters, accumulate=microbatches > 1) for optimizer in found]
    for optimizer in found:
        stepped = optimizer.inner if isinstance(optimizer, MasteredOptimizer) else optimizer
        precision = run.precision
        in_one_kernel = isinstance(precision, PolicyPrecision) and precision.may_step_in_one_kernel(run)
        if in_one_kernel and suits_one_kernel(stepped):
            vars(optimizer)["step"] = _without_counting(optimizer.step, ledger)
        else:
            step_as_on_cuda(optimizer)
    return found


def _without_counting(step: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with ledger.paused():
            return step(*args, **kwargs)

    return uncounted
