"""Sharding as plain tensor code, which the compiler traces and schedules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.compile import overlap
from lightning_ups._compat.torch.compile.dynamo import donated_buffers_off, loggers_left_out
from lightning_ups._compat.torch.compile.partitioner import gradients_apart, random_states_in_place
from lightning_ups.order import Context, PolicyPrecision, Report, Stage, Step, applied
from lightning_ups.strategies.checkpoints import OnUnreplayable, Save
from lightning_ups.strategies.sharding import (
    Sharding,
    ShardingStrategy,
    ShardStep,
    check_known,
    check_sharding,
    gather_options,
)
from lightning_ups.transforms.blocks import Blocks, as_patterns, roots, select_blocks
from lightning_ups.transforms.compile import (
    Compiled,
    Compiler,
    advice_for_one_graph,
    advice_if_uncompiled,
    compiled,
    hearing,
    prepared,
    refuse_compiled,
    repeated_backward,
)
from lightning_ups.transforms.error_hints import explaining_shards_read, explaining_types, note_second_backward
from lightning_ups.transforms.fsdp import Sync
from lightning_ups.transforms.kv_cache import without_kv_cache
from lightning_ups.transforms.sharding import StepState
from lightning_ups.transforms.shards_in_steps import plain_from_shards, refusing_gradients_of_shards
from lightning_ups.transforms.simple_fsdp import (
    Gathering,
    GatherPlan,
    Parametrised,
    ParametriseOptions,
    parametrise,
    parametrised,
)
from lightning_ups.transforms.tensor_parallel import Style, check_plan

__all__ = ["SimpleFSDPStrategy"]

Overlap = Literal["blocks", "none"]

_PART = "SimpleFSDPStrategy"

_NOT_HERE: dict[str, tuple[Any, str]] = {  # options of FSDP2Strategy: the default, and why no other value is possible
    "prefetch": (None, "The compiler places gathers, each beside the block before."),
    "offload": (False, "A graph reads shards where it computes, and they are on the device."),
    "outside": ((), "Any read of a parameter gathers it, and none needs to be named."),
    "unused_parameters": (False, "All devices run one graph, with one order of reductions."),
    "tensor_parallel_size": (1, "A graph of ours gathers what is split over data-parallel devices alone."),
    "tensor_parallel_plan": (None, "A graph of ours gathers what is split over data-parallel devices alone."),
}


@dataclass(frozen=True)
class _Graphs(Step):
    """Compiler passes for gathers and reductions, active during the compilation of whole roots."""

    stage = Stage.COMPILE
    strategy: "SimpleFSDPStrategy"
    options: ParametriseOptions
    compiles: bool  # because no Compile is given

    @override
    @contextmanager
    def change(self, module: LightningModule, context: Context) -> Iterator[None]:
        names = [name for name, _ in roots(module)]
        blocks = select_blocks(module, self.strategy.blocks)
        key = f"{self.options} over {context.mesh}"
        plan = GatherPlan.of(blocks, names, recompute=self.options.reshard_after_forward, key=key)
        with ExitStack() as stack:
            stack.enter_context(prepared(plan))
            stack.enter_context(hearing(lambda said: self.strategy._gathering.note(said)))
            stack.enter_context(random_states_in_place())
            stack.enter_context(gradients_apart())
            why = self._not_put_together(module)
            # Programs depend on the device's position in the mesh, which inductor's caches do not know.
            here = f"{plan} at {context.mesh and context.mesh.get_coordinate()}"
            stack.enter_context(overlap.bucketing(together=why is None, key=here, told=_Told(context.report)))
            context.report.note(
                _PART,
                "inductor puts collectives together by block, and overlaps them with the next"
                if why is None
                else f"each parameter is gathered by itself: {why}",
                overlap="blocks" if why is None else "none",
            )
            with advice_for_one_graph(_PART), loggers_left_out(lambda: _tell_of_loggers(context.report)):
                if self.compiles:
                    stack.enter_context(self._compiled(module, context, blocks))
                yield

    def _not_put_together(self, module: LightningModule) -> str | None:
        if self.strategy.overlap == "none":
            return "overlap='none'"
        backend = next((c.compiler.backend for c in _compilers(module)), "inductor")
        return None if backend == "inductor" else f"the passes are inductor's, and this is {backend}"

    @contextmanager
    def _compiled(self, module: LightningModule, context: Context, blocks: Blocks) -> Iterator[None]:
        found = Blocks(dict(roots(module)), origin="roots")
        refuse_compiled(module, found)
        place = repeated_backward(module) if context.training else None
        if place is not None and place.kind == "create_graph":
            why = f"{place.where} uses {place.word}, and compiled code has no second derivatives"
            context.report.note(_PART, f"nothing compiled, since {why}")
            yield
            return
        with ExitStack() as stack:
            if context.training:
                stack.enter_context(without_kv_cache(module))
            if place is not None:
                stack.enter_context(donated_buffers_off())
            now = stack.enter_context(
                compiled(
                    found,
                    Compiler(fullgraph=True),
                    on_failure="eager",
                    tell=rank_zero_warn,
                    parts_of=lambda root: {name: each for name, each in blocks.items() if name.startswith(f"{root}.")},
                    advice=advice_if_uncompiled(_PART),
                )
            )
            count = f"{len(found)} root{'' if len(found) == 1 else 's'}"
            context.report.note(_PART, f"{count} compiled whole by inductor, since no Compile is given")
            self.strategy._compiled = now
            try:
                yield
            finally:
                context.report.update(_PART, compiled=now.facts)
                self.strategy._compiled = None


def _refuse_those_of_fsdp2(**options: object) -> None:
    for name, value in options.items():
        default, why = _NOT_HERE[name]
        if value != default:
            raise ValueError(
                f"{_PART}({name}={value!r}) is what FSDP2Strategy can do, and this strategy cannot."
                f" {why} Leave it out, or use FSDP2Strategy."
            )


def _tell_of_loggers(report: Report) -> None:
    report.update(_PART, loggers_left_out=True)
    rank_zero_warn(
        "SimpleFSDPStrategy leaves out of its graph what a module writes to a logger in its forward."
        " Python's logging would end the graph, and with it what hides communication."
        " To read it, run a step with FSDP2Strategy."
    )


def _compilers(module: LightningModule) -> list[Any]:
    callbacks: Sequence[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Step) and callback.stage is Stage.COMPILE]


@dataclass(frozen=True)
class _Told:
    """Writes to the report what each graph communicates."""

    report: Report

    def __call__(self, graph: overlap.GraphCollectives) -> None:
        graphs = self.report.parts[_PART].get("graphs", [])
        self.report.update(_PART, graphs=[*graphs, asdict(graph)])


@dataclass(frozen=True)
class _Parametrise(ShardStep):
    part = _PART
    missed = "They are not sharded"
    options: ParametriseOptions

    @override
    def shard(self, module: LightningModule, blocks: Blocks, mesh: DeviceMesh) -> Parametrised:
        return parametrise(
            module, blocks=blocks, roots=[root for _, root in roots(module)], mesh=mesh, options=self.options
        )


class SimpleFSDPStrategy(ShardingStrategy):
    """Shard parameters, gradients and optimizer state with tensor code that is compiled with the model.

    One graph per outermost submodule contains compute and communication. The compiler groups gathers and reductions by
    block, and overlaps them with other blocks. The module needs no changes, and parameter names stay the same. Options
    and checkpoints are those of FSDP2Strategy: to switch, change the name.

    A `Compile` callback compiles each outermost submodule as one graph; without it, the strategy does. If that fails
    for a submodule, its blocks are compiled instead, with a warning.

    Args:
        sharding: ``"full"`` shards parameters, gradients and optimizer state; ``"gradients"`` keeps parameters
            gathered from forward to backward; ``"none"`` keeps a copy on every device, as DDP does.
        reshard_after_forward: Overrides that part of ``sharding``: True or False.
        replicate_size: Number of replicas of the sharded model. Each is sharded over adjacent ranks.
        blocks: Patterns of submodules whose parameters are gathered together. None: the blocks that repeat.
        sync: When gradients are reduced under ``accumulate_grad_batches``. The reduction is part of the graph, so it
            runs after each microbatch: ``"every"``, which is also the meaning of ``"auto"``; ``"last"`` is refused.
        overlap: ``"blocks"`` lets inductor group the collectives of each block, and gather a block while the previous
            one computes; ``"none"`` keeps one collective per parameter.
        prefetch: An option of FSDP2Strategy, like all up to ``tensor_parallel_plan``: its default is accepted, so that
            one configuration works with both strategies; any other value is refused.
        offload: See ``prefetch``.
        outside: See ``prefetch``.
        unused_parameters: See ``prefetch``.
        tensor_parallel_size: See ``prefetch``.
        tensor_parallel_plan: See ``prefetch``.
        meta_device: Run ``configure_model`` on the meta device, so that the model never exists unsharded. The initial
            values are the same.
        initialise_on: Where random initial values are drawn if the module was built on the meta device: ``"cpu"`` gives
            the values of a module built in place, ``"device"`` is faster.
        sigterm_every: Steps between two checks whether any rank received SIGTERM, or SLURM's requeue signal; all ranks
            act on it within twice as many steps.
        process_group_backend: None: NCCL for GPUs and gloo for CPUs, both.
        timeout_minutes: A collective that takes longer is an error.
        high_priority_communication: Run NCCL's kernels with high priority.
        communication_multiprocessors: The maximum number of a GPU's multiprocessors that a collective may use. None:
            NCCL's default.
        flight_recorder: A folder for a record of each rank's last collectives, written if one hangs. None: no record.
        save: ``"sharded"``: a checkpoint is a folder to which every rank writes its part. ``"full"``: one file,
            gathered on rank 0, as a single device would write it.
        async_save: Copy the state to the host, and write it while training continues.
        weights_only: Load only data from a checkpoint that cannot run code.
        on_unreplayable: ``"warn"`` or ``"refuse"`` if the run could not be resumed exactly.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a choice is unknown or not supported here, or if two contradict each other.

    Example::

        Trainer(strategy=SimpleFSDPStrategy(), precision="bf16-mixed")
    """

    whole_graph = True

    def __init__(
        self,
        *,
        sharding: Sharding = "full",
        reshard_after_forward: bool | int | Literal["auto"] | None = None,
        replicate_size: int = 1,
        blocks: Sequence[str] | None = None,
        sync: Sync = "auto",
        overlap: Overlap = "blocks",
        prefetch: int | None = None,
        offload: bool = False,
        outside: Sequence[str] = (),
        unused_parameters: bool = False,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: str | Mapping[str, Style] | None = None,
        meta_device: bool = False,
        initialise_on: Literal["cpu", "device"] = "cpu",
        sigterm_every: int = 4,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30,
        high_priority_communication: bool = True,
        communication_multiprocessors: int | None = None,
        flight_recorder: str | Path | None = None,
        save: Save = "sharded",
        async_save: bool = False,
        weights_only: bool = True,
        on_unreplayable: OnUnreplayable = "warn",
    ) -> None:
        if tensor_parallel_plan is not None:
            check_plan(tensor_parallel_plan)
        _refuse_those_of_fsdp2(
            prefetch=prefetch,
            offload=offload,
            outside=as_patterns(outside),
            unused_parameters=unused_parameters,
            tensor_parallel_size=tensor_parallel_size,
            tensor_parallel_plan=tensor_parallel_plan,
        )
        check_sharding(self, sharding, replicate_size=replicate_size, reshard_after_forward=reshard_after_forward)
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"{_PART}(reshard_after_forward={reshard_after_forward!r}) is no choice here."
                " A graph gathers anew, from all devices, or keeps what it gathered, and that from the first step on."
                " Use True or False, or FSDP2Strategy."
            )
        if sync == "last":
            raise ValueError(
                f"{_PART}(sync='last') would reduce gradients once for each optimizer step."
                " The reduction is part of the graph of forward and backward, which runs for each microbatch."
                " Use sync='every', which is what 'auto' means here, or FSDP2Strategy."
            )
        check_known(self, "sync", sync, ("auto", "every"))
        check_known(self, "overlap", overlap, ("blocks", "none"))
        super().__init__(
            sharding=sharding,
            replicate_size=replicate_size,
            blocks=blocks,
            tensor_parallel_size=1,
            offload=False,
            meta_device=meta_device,
            initialise_on=initialise_on,
            unused_parameters=False,
            sigterm_every=sigterm_every,
            process_group_backend=process_group_backend,
            timeout_minutes=timeout_minutes,
            high_priority_communication=high_priority_communication,
            communication_multiprocessors=communication_multiprocessors,
            flight_recorder=flight_recorder,
            save=save,
            async_save=async_save,
            weights_only=weights_only,
            on_unreplayable=on_unreplayable,
        )
        self.overlap: Overlap = overlap
        self._reshard = sharding == "full" if reshard_after_forward is None else reshard_after_forward
        self._compiled: Compiled | None = None  # if no Compile is given
        self._proven = False

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "reshard_after_forward": self._reshard}

    @property
    def _gathering(self) -> Gathering:
        assert self.lightning_module is not None
        done = parametrised(self.lightning_module)
        assert done is not None
        return done.gathering

    @override
    def _own_steps(self, module: LightningModule, precision: PolicyPrecision) -> list[Step]:
        options = ParametriseOptions(
            **gather_options(precision.policy),
            reshard_after_forward=self._reshard,
        )
        return [_Graphs(self, options, not _compilers(module)), _Parametrise(self.blocks, options)]

    @override
    def _prepare_training(self, precision: PolicyPrecision) -> None:
        super()._prepare_training(precision)
        self._proven = False
        self._gathering.noted = 0

    @override
    def on_exception(self, exception: BaseException) -> None:
        cure = "Each outermost submodule is one graph here, which can be differentiated once. Use strategy='ddp'."
        note_second_backward(exception, kind="compiled", cure=cure)
        super().on_exception(exception)

    # Steps: within them, reading a parameter gathers it

    @override
    @contextmanager
    def _within_step(self, step: StepState) -> Iterator[None]:
        gathering = self._gathering
        with (
            gathering.reading(whole=True),
            gathering.noting(training=step.is_training),
            advice_for_one_graph(_PART),
            explaining_shards_read(step.name),
            explaining_types(step.name, param_dtype=gathering.options.module_dtype),
            refusing_gradients_of_shards(step.name),
            plain_from_shards(),
        ):
            yield
        assert self.lightning_module is not None
        gathering.check_unwritten(self.lightning_module)
        if self._compiled is not None:
            with advice_for_one_graph(_PART):
                self._compiled.check()

    @override
    @contextmanager
    def _within_backward(self) -> Iterator[None]:
        # Recomputation reads parameters again.
        step, gathering = "The backward of training_step", self._gathering
        with ExitStack() as stack:
            stack.enter_context(gathering.reading(whole=True))
            stack.enter_context(refusing_gradients_of_shards(step))
            if not self._in_manual_step:  # otherwise the step reports it
                stack.enter_context(explaining_shards_read(step))
                stack.enter_context(explaining_types(step, param_dtype=gathering.options.module_dtype))
            yield

    @override
    def _mark(self) -> int:
        return self._gathering.noted

    @override
    def _after_averaging(self) -> None:
        if self._compiled is not None and not self._proven:
            with advice_for_one_graph(_PART):
                self._compiled.check_ran()
            self._compiled.trial, self._proven = False, True
            for group in self._compiled.groups:
                rank_zero_info(f"{_PART}: {group.summary}")
            if (context := applied(self)) is not None:
                context.report.update(_PART, compiled=self._compiled.facts)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        # In a manual step: an optimizer of this package may read parameters through their modules, and needs shards.
        with self._gathering.reading(whole=False):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
