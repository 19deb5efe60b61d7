"""Sharding as plain tensor code, which the compiler traces and schedules."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.compile import overlap
from lightning_ups._compat.torch.compile.dynamo import donated_buffers_off, loggers_left_out
from lightning_ups._compat.torch.compile.partitioner import gradients_apart, random_states_in_place
from lightning_ups.order import Context, PolicyPrecision, Report, Stage, Step, applied
from lightning_ups.order.arguments import check_choice
from lightning_ups.strategies.checkpoints import OnUnreplayable, Save
from lightning_ups.strategies.processes import Communication
from lightning_ups.strategies.sharding import Device, Sharding, ShardingStrategy
from lightning_ups.strategies.steps import ShardStep, gather_options
from lightning_ups.transforms.blocks import Blocks, roots, select_blocks
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

Overlap = Literal["blocks", "none"]

_PART = "SimpleFSDPStrategy"


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
    options: ParametriseOptions

    @override
    def shard(self, module: LightningModule, blocks: Blocks, mesh: DeviceMesh) -> Parametrised:
        return parametrise(
            module, blocks=blocks, roots=[root for _, root in roots(module)], mesh=mesh, options=self.options
        )


class SimpleFSDPStrategy(ShardingStrategy):
    """Shard parameters, gradients and optimizer state with tensor code that is compiled with the model.

    One graph per outermost submodule contains compute and communication. The compiler groups gathers and reductions by
    block, and overlaps them with other blocks. The module needs no changes, and parameter names stay the same.
    Checkpoints are those of FSDP2Strategy, and so are the options that it has. To switch, leave out the others.

    A `Compile` callback compiles each outermost submodule as one graph; without it, the strategy does. If that fails
    for a submodule, its blocks are compiled instead, with a warning.

    Args:
        sharding: ``"full"`` shards parameters, gradients and optimizer state; ``"gradients"`` keeps parameters
            gathered from forward to backward; ``"none"`` keeps a copy on every device, as DDP does.
        replicate_size: Number of replicas of the sharded model. Each is sharded over adjacent ranks.
        blocks: Patterns of submodules whose parameters are gathered together. None: the blocks that repeat.
        overlap: ``"blocks"`` lets inductor group the collectives of each block, and gather a block while the previous
            one computes; ``"none"`` keeps one collective per parameter.
        meta_device: Run ``configure_model`` on the meta device, so that the model never exists unsharded. The initial
            values are the same.
        initialise_on: Where random initial values are drawn if the module was built on the meta device: ``"cpu"`` gives
            the values of a module built in place, ``"device"`` is faster.
        sigterm_every: Steps between two checks whether any rank received SIGTERM, or SLURM's requeue signal; all ranks
            act on it within twice as many steps.
        communication: Timeout and options of NCCL.
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
        replicate_size: int = 1,
        blocks: Sequence[str] | None = None,
        overlap: Overlap = "blocks",
        meta_device: bool = False,
        initialise_on: Device = "cpu",
        sigterm_every: int = 4,
        communication: Communication = Communication(),  # noqa: B008  (frozen)
        save: Save = "sharded",
        async_save: bool = False,
        weights_only: bool = True,
        on_unreplayable: OnUnreplayable = "warn",
    ) -> None:
        check_choice("overlap", overlap, get_args(Overlap), of=_PART, why="It says what inductor does.")
        super().__init__(
            sharding=sharding,
            replicate_size=replicate_size,
            blocks=blocks,
            meta_device=meta_device,
            initialise_on=initialise_on,
            sigterm_every=sigterm_every,
            communication=communication,
            save=save,
            async_save=async_save,
            weights_only=weights_only,
            on_unreplayable=on_unreplayable,
        )
        self.overlap: Overlap = overlap
        self._reshard = sharding == "full"
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
