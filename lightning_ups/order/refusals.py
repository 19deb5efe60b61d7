"""All combinations that cannot work, as data. They raise before the first step, and ``explain`` lists them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_ups._compat.torch.compile.partitioner import heeds_memory_budget
from lightning_ups.order.capabilities import (
    STOCK_POLICIES,
    Compilation,
    HasCapabilities,
    OnlyOne,
    ReadsPastForward,
    capabilities_of,
    policy_of,
)
from lightning_ups.order.run import Run, Stage, Step
from lightning_ups.transforms.fsdp import is_sharded
from lightning_ups.transforms.simple_fsdp import is_parametrised
from lightning_ups.transforms.step_graph import names_read
from lightning_ups.transforms.tensor_parallel import plan_of, styles_of

_IN_BACKWARD = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
_CONSTANTS = ("global_step", "current_epoch", "logger", "loggers")  # for a replay
_ON_HOST = ("StepGuard", "ActivationOffload", "OptimizerOffload")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One combination: when it applies, and its error message. The texts may contain names from the run."""

    what: Callable[[Run], str]
    why: str
    cure: str
    holds: Callable[[Run], bool]

    def text(self, run: Run) -> str:
        """Return what is wrong, why, and what to do."""
        return f"{self.what(run)} {self.why} {self.cure}"


_SECOND = Refusal(
    what=lambda run: f"Two callbacks of one class are given: {_repeated(run)[0]}.",
    why="Both would do the same to the whole run, the second on the result of the first.",
    cure="Keep one of them, with the settings of both.",
    holds=lambda run: bool(_repeated(run)),
)

_FP16 = Refusal(
    what=lambda run: f"precision={run.precision.precision!r} is given with {run.strategy.name}.",
    why="Its gradient scaler would have to agree on infinities across shards, and FSDP2 has no such scaler.",
    cure="Use precision='bf16-mixed'.",
    holds=lambda run: run.strategy.ours and run.strategy.shards and run.precision.precision == "16-mixed",
)

_NO_POLICY = Refusal(
    what=lambda run: (
        f"{type(run.precision).__name__}, precision={run.precision.precision!r}, has no meaning"
        f" under {run.strategy.name}."
    ),
    why="FSDP2 casts parameters according to a dtype policy, and this precision does not have one.",
    cure=f"Use one of {tuple(STOCK_POLICIES)}, or a precision of lightning_ups.",
    holds=lambda run: (
        run.strategy.ours
        and run.strategy.shards
        and policy_of(run.precision) is None
        and run.precision.precision not in ("16-mixed", "bf16-true")  # have their own rows
    ),
)

_BF16_TRUE = Refusal(
    what=lambda run: f"precision='bf16-true' has no meaning under {run.strategy.name}.",
    why="FSDP2 casts parameters according to a dtype policy, and this precision casts the module itself.",
    cure=(
        "Use plugins=[BF16WeightsPrecision()], which also has bfloat16 weights and rounds stochastically, or"
        " precision='bf16-mixed', which has float32 weights."
    ),
    holds=lambda run: run.strategy.ours and run.strategy.shards and run.precision.precision == "bf16-true",
)

_LEAVE = "or leave StepGraph out."
_CAPTURE = (
    Refusal(
        what=lambda run: f"StepGraph is given for a run on {_devices(run)} devices.",
        why="It captures the step of one device.",
        cure=f"Use devices=1, {_LEAVE}",
        holds=lambda run: _captures(run) and _devices(run) > 1,
    ),
    Refusal(
        what=lambda run: f"StepGraph is given, and {type(run.module).__name__} optimizes manually.",
        why="It captures the step that Lightning makes with automatic optimization.",
        cure=f"Set automatic_optimization = True, {_LEAVE}",
        holds=lambda run: _captures(run) and not run.module.automatic_optimization,
    ),
    Refusal(
        what=lambda run: f"StepGraph is given with {type(run.precision).__name__}, {run.precision.precision!r}.",
        why="Its steps do more than the GPU can repeat alone, such as scaling losses.",
        cure=f"Use precision='bf16-mixed' or BF16Precision(), {_LEAVE}",
        holds=lambda run: _captures(run) and not _has_plain_precision(run.precision),
    ),
    Refusal(
        what=lambda run: f"StepGraph is given with {_graphs_of_compile(run)[0]}, which may replay CUDA graphs itself.",
        why="One graph cannot contain the replay of another.",
        cure="Use Compile(mode='default').",
        holds=lambda run: _captures(run) and bool(_graphs_of_compile(run)),
    ),
    Refusal(
        what=lambda run: f"StepGraph is given, and torch.compile({type(run.module).__name__}) to the Trainer.",
        why="Compiled code would contain what StepGraph records of the step.",
        cure="Pass the module as it is, with the callback Compile(scope='model').",
        holds=lambda run: _captures(run) and run.compiled_by_user,
    ),
    Refusal(
        what=lambda run: f"StepGraph is given with {_working_on_host(run)[0]}.",
        why="Its work in each step is done by the host, which a replay leaves out.",
        cure="Keep one of the two.",
        holds=lambda run: _captures(run) and bool(_working_on_host(run)),
    ),
    Refusal(
        what=lambda run: f"StepGraph is given with detect_anomaly={run.detects_anomalies}.",
        why="It reads each gradient on the host.",
        cure="Leave one of the two out.",
        holds=lambda run: _captures(run) and run.detects_anomalies,
    ),
    Refusal(
        what=lambda run: f"StepGraph is given, and {_hooks_inside(run)[0]} is called inside the step.",
        why="A replay runs no Python code, so the hook would have no effect.",
        cure=f"Move its code to on_train_batch_end, {_LEAVE}",
        holds=lambda run: _captures(run) and bool(_hooks_inside(run)),
    ),
    Refusal(
        what=lambda run: (
            f"StepGraph is given, and training_step of {type(run.module).__name__} reads {_constants_read(run)[0]}."
        ),
        why="It would keep the value that it has when the step is captured.",
        cure=f"Read it in on_train_batch_start, and keep what follows from it in a buffer, {_LEAVE}",
        holds=lambda run: _captures(run) and bool(_constants_read(run)),
    ),
    Refusal(
        what=lambda run: f"StepGraph is given, and training_step of {type(run.module).__name__} takes dataloader_iter.",
        why="A replay cannot read a loader.",
        cure=f"Take a batch, {_LEAVE}",
        holds=lambda run: (
            _captures(run) and is_param_in_hook_signature(run.module.training_step, "dataloader_iter", explicit=True)
        ),
    ),
    Refusal(
        what=lambda run: f"StepGraph needs CUDA graphs, and this run is on {run.accelerator}.",
        why="Only a GPU can replay them.",
        cure="Leave it out, or write StepGraph(emulate=True) to test it.",
        holds=lambda run: _captures(run) and run.accelerator != "cuda" and not _emulates(run),
    ),
    Refusal(
        what=lambda run: f"StepGraph is given with {run.strategy.name}.",
        why="It captures the step of one device.",
        cure=f"Use devices=1 and strategy='auto', {_LEAVE}",
        holds=lambda run: _captures(run) and not run.strategy.on_one_device and _devices(run) == 1,
    ),
)

REFUSALS = (
    _SECOND,
    Refusal(
        what=lambda run: f"{' and '.join(_owners(run))} would both keep the optimizer's state.",
        why="Each replaces the optimizer by one that keeps its state elsewhere. The state can be in one place only.",
        cure="Keep one of them.",
        holds=lambda run: len(_owners(run)) > 1,
    ),
    Refusal(
        what=lambda run: f"{_writing(run)[0]} is given with {type(run.precision).__name__}(weights='masters').",
        why="It would write into the bfloat16 copies of the weights, and the masters would overwrite the result.",
        cure="Use weights='autocast' in the precision.",
        holds=lambda run: run.training and _has_masters(run) and bool(_writing(run)),
    ),
    Refusal(
        what=lambda run: f"{_pruning(run)[0]} is given with {run.strategy.name}.",
        why="It ranks whole weights and replaces them by masked copies, but each device holds only a shard.",
        cure="Prune before fit, or use strategy='ddp'.",
        holds=lambda run: run.training and _shards_itself(run) and bool(_pruning(run)),
    ),
    Refusal(
        what=lambda run: f"{_seeking(run)[0]} is given with {run.strategy.name}.",
        why="Lightning tries batch sizes without a distributed strategy only, and this is one, on a single device too.",
        cure="Use strategy='auto' on one device to find the size, or let `plan` predict the largest batch.",
        holds=lambda run: (run.strategy.shards or "DDP" in run.strategy.name) and bool(_seeking(run)),
    ),
    _FP16,
    _NO_POLICY,
    _BF16_TRUE,
    Refusal(
        what=lambda run: (
            f"{run.strategy.name}({', '.join(f'{name}={size}' for name, size in _sizes(run).items())},"
            f" replicate_size={_copies(run)}) is given"
            f" for a run on {_devices(run)} {'device' if _devices(run) == 1 else 'devices'}."
        ),
        why="Every device has exactly one place in the mesh.",
        cure="Choose sizes whose product divides the number of devices.",
        holds=lambda run: _devices(run) % (_group(run) * _copies(run)) != 0,
    ),
    Refusal(
        what=lambda run: (
            f"{run.strategy.name}(reshard_after_forward={run.strategy.settings['reshard_after_forward']}) is given"
            f" where parameters are sharded over {_sharded_over(run)}."
        ),
        why="Gathered parameters stay spread over groups of this size, and all groups must be equal.",
        cure="Use a number that divides it, or True or False.",
        holds=lambda run: (
            type(size := run.strategy.settings.get("reshard_after_forward")) is int and _sharded_over(run) % size != 0
        ),
    ),
    Refusal(
        what=lambda run: "tensor_parallel_plan of {} splits {}, and {} reads its weight past its forward.".format(
            run.strategy.name, *_read_split(run)[0]
        ),
        why="It needs the whole weight on each device, but only the submodule's forward handles the split.",
        cure="Leave that setting of the model at its default.",
        holds=lambda run: bool(_read_split(run)),
    ),
    Refusal(
        what=lambda run: (
            f"{_writing(run)[0]} is given with {run.strategy.name}(pipeline_parallel_size={_stages(run)})."
        ),
        why="It copies the whole model, and each device has only some blocks.",
        cure="Leave it out, or leave pipeline_parallel_size out.",
        holds=lambda run: run.training and _stages(run) > 1 and bool(_writing(run)),
    ),
    Refusal(
        what=lambda run: f"{_whole(run)[0]} would compile whole models under {run.strategy.name}.",
        why="The strategy gathers parameters in hooks of each block, which would break the graph.",
        cure="Use scope='blocks'.",
        holds=lambda run: run.strategy.shards and not run.strategy.whole_graph and bool(_whole(run)),
    ),
    Refusal(
        what=lambda run: f"{_not_whole(run)[0]} is given under {run.strategy.name}.",
        why=(
            "The strategy is compiled with the model. Only in one graph can the compiler combine the gathers of"
            " parameters and overlap them with other blocks."
        ),
        cure="Leave that out, or use FSDP2Strategy, which gathers in hooks.",
        holds=lambda run: run.strategy.whole_graph and bool(_not_whole(run)),
    ),
    Refusal(
        what=lambda run: f"{_compilation_off()} is set, and {run.strategy.name} is given.",
        why="Without torch.compile the strategy would gather each parameter separately, and wait for each.",
        cure="Unset it, or use FSDP2Strategy.",
        holds=lambda run: run.strategy.whole_graph and _compilation_off() is not None,
    ),
    Refusal(
        what=lambda run: f"detect_anomaly=True is given with {run.strategy.name}.",
        why="It checks each gradient for NaN, and sharded gradients do not support that operation.",
        cure="Leave it out, or look for the anomaly with FSDP2Strategy, which trains the same.",
        holds=lambda run: run.training and run.strategy.whole_graph and run.detects_anomalies,
    ),
    Refusal(
        what=lambda run: f"{_drawing(run)[0]}(log_graph=True) is given with {run.strategy.name}.",
        why="It runs the model on rank 0 only, which would wait for the shards of the other ranks.",
        cure="Leave log_graph out, and draw the graph of a module that is not sharded.",
        holds=lambda run: run.training and _shards_itself(run) and bool(_drawing(run)),
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__}(all_gather=True) is given under {run.strategy.name}.",
        why="Only FSDP2Strategy gathers weights in float8.",
        cure="Leave all_gather out: products are still in float8. Or use FSDP2Strategy.",
        holds=lambda run: (
            capabilities_of(run.precision).wants_float8_gathers
            and (run.strategy.whole_graph or (run.training and not _shards_itself(run)))
        ),
    ),
    Refusal(
        what=lambda run: f"{_graphed(run)[0]} would replay CUDA graphs under {run.strategy.name}.",
        why="A CUDA graph reads weights at fixed addresses, and gathered parameters have new ones each time.",
        cure="Use mode='default' or 'max-autotune-no-cudagraphs'.",
        holds=lambda run: run.strategy.shards and bool(_graphed(run)),
    ),
    Refusal(
        what=lambda run: (
            f"{one_graph(run)[0]} makes one graph of whole models or replays CUDA graphs, and"
            f" {offloading(run.declarations)[0]} is given."
        ),
        why="Inside one graph, blocks do not save tensors separately, and a replayed graph has its own memory.",
        cure="Use Compile(scope='blocks', mode='default') under a strategy of blocks, or leave the offloading out.",
        holds=lambda run: run.training and bool(offloading(run.declarations)) and bool(one_graph(run)),
    ),
    Refusal(
        what=lambda run: f"{_uncompiled(run)[0]}(memory_budget=...) needs compiled code, and nothing is compiled.",
        why="With a budget, the compiler chooses which activations to keep and which to recompute.",
        cure="Add Compile() to the callbacks, or use save='matmuls' instead of memory_budget.",
        holds=lambda run: run.training and bool(_uncompiled(run)),
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__}({_uncompilable(run)}) is given with Compile.",
        why="Transformer Engine does not support it in compiled code.",
        cure="Use recipe='current', or leave Compile out.",
        holds=lambda run: run.training and _uncompilable(run) is not None and run.compiles,
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__} is given with {_in_one_graph(run)}.",
        why="Each module of Transformer Engine is a graph break.",
        cure="Leave fullgraph out, use FSDP2Strategy, or use Float8Precision, whose products are compiled.",
        holds=lambda run: run.training and _breaks_graphs(run) and _in_one_graph(run) is not None,
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__} is given with ActivationCheckpoint and Compile.",
        why="What Transformer Engine recomputes must go through its own checkpoint, which is not compiled.",
        cure="Leave one of the two callbacks out, or use recipe=None.",
        holds=lambda run: (
            run.training
            and capabilities_of(run.precision).recomputes_itself
            and run.compiles
            and any(step.stage is Stage.RECOMPUTE for step in run.declarations)
        ),
    ),
    Refusal(
        what=lambda run: f"Compile(backend={_without_random_numbers(run)!r}) is given with ActivationCheckpoint.",
        why="That backend draws new random numbers when it recomputes, so dropout would get wrong gradients.",
        cure="Use backend='aot_eager' or the default, or leave one of the two callbacks out.",
        holds=lambda run: run.training and _without_random_numbers(run) is not None,
    ),
    Refusal(
        what=lambda run: "Compile(backend={1!r}) is given with {0}(memory_budget=...).".format(*_unbudgeted(run)[0]),
        why="The budget acts where a graph is split by cost, and that backend does not split graphs by cost.",
        cure="Use the default backend or 'aot_eager', or say what is kept by save='matmuls' or another.",
        holds=lambda run: run.training and bool(_unbudgeted(run)),
    ),
    Refusal(
        what=lambda run: f"torch.compile({type(run.module).__name__}) was given to the Trainer, and Compile() as well.",
        why="The module would be compiled twice, and only one of the two could be reported or undone.",
        cure="Pass the module as it is, and keep the callback.",
        holds=lambda run: run.compiled_by_user and _must_compile(run),
    ),
    Refusal(
        what=lambda run: (
            f"{type(run.module).__name__} was sharded by an earlier run, and {run.strategy.name} does not shard."
        ),
        why="Sharding stays on a module, and this strategy would train the shards as if they were unsharded.",
        cure="Keep the strategy of the earlier run, or build the module anew and load a checkpoint.",
        holds=lambda run: not run.strategy.shards and _is_sharded(run),
    ),
    Refusal(
        what=lambda run: f"torch.compile({type(run.module).__name__}) was given to {run.strategy.name}.",
        why="It would compile the module as one graph, which the strategy's gathers of parameters would break.",
        cure="Pass the module as it is, with the callback Compile().",
        # Without Compile(), which has its own row.
        holds=lambda run: run.compiled_by_user and _shards_itself(run) and not _must_compile(run),
    ),
    Refusal(
        what=lambda run: f"{_wrapped(run, 'OptimizedModule')[0]} was returned by torch.compile.",
        why="It renames every parameter inside, so checkpoints would only load into compiled models.",
        cure="Use the module itself, with the callback Compile(blocks=[...]).",
        holds=lambda run: _shards_itself(run) and bool(_wrapped(run, "OptimizedModule")),
    ),
    Refusal(
        what=lambda run: (
            f"{(_wrapped(run, 'FullyShardedDataParallel') + _wrapped(run, 'DistributedDataParallel'))[0]}"
            " is already wrapped for data parallelism."
        ),
        why="Its gradients would be reduced twice.",
        cure="Use the module itself, and let the strategy shard it.",
        holds=lambda run: (
            _shards_itself(run)
            and bool(_wrapped(run, "FullyShardedDataParallel") or _wrapped(run, "DistributedDataParallel"))
        ),
    ),
    *_CAPTURE,
)


def refusals(run: Run) -> list[Refusal]:
    """Return all refusals that apply to ``run``."""
    return [refusal for refusal in REFUSALS if refusal.holds(run)]


def check(run: Run) -> None:
    """Raise ValueError with the first refusal that applies, if there is one."""
    _refuse(run, REFUSALS)


def refuse_second(run: Run) -> None:
    """Raise ValueError if there are two callbacks of which a Trainer can have only one."""
    _refuse(run, [_SECOND])


def refuse_capture(run: Run) -> None:
    """Raise ValueError if the step of ``run`` cannot be captured as one CUDA graph, but a callback would do it."""
    _refuse(run, _CAPTURE)


def refuse_precision(run: Run) -> None:
    """Raise ValueError if the strategy does not support the precision.

    Called before a Trainer exists, because a Trainer replaces a precision that the device does not support.
    """
    _refuse(run, [_FP16, _NO_POLICY, _BF16_TRUE])


def _refuse(run: Run, rows: Iterable[Refusal]) -> None:
    for refusal in rows:
        if refusal.holds(run):
            raise ValueError(refusal.text(run))


def _repeated(run: Run) -> list[str]:
    """Return the classes that occur more than once; a subclass counts as the class of this package it derives from."""
    callbacks = [callback for callback in run.callbacks if isinstance(callback, (OnlyOne, Step))]
    counts = Counter(_kind(type(callback)).__name__ for callback in callbacks)
    return [kind for kind, count in counts.items() if count > 1]


def _kind(given: type) -> type:
    ours = [base for base in given.__mro__ if base.__module__.startswith("lightning_ups.callbacks.")]
    return ours[-1] if ours else given


def _owners(run: Run) -> list[str]:
    return [type(step).__name__ for step in run.declarations if step.owns_optimizer_state]


def _drawing(run: Run) -> list[str]:
    if run.module.example_input_array is None:
        return []  # no input to run it on
    return [type(each).__name__ for each in run.loggers if isinstance(each, TensorBoardLogger) and each._log_graph]


def _writing(run: Run) -> list[str]:
    """Return callbacks that write weights of their own into the model."""
    averages = [c for c in run.callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    rewinds = [c for c in run.callbacks if isinstance(c, ModelPruning) and c._use_lottery_ticket_hypothesis]
    return [type(c).__name__ for c in (*averages, *rewinds)]


def _pruning(run: Run) -> list[str]:
    return [type(c).__name__ for c in run.callbacks if isinstance(c, ModelPruning)]


def _seeking(run: Run) -> list[str]:
    return [type(c).__name__ for c in run.callbacks if isinstance(c, BatchSizeFinder)]


def _has_masters(run: Run) -> bool:
    policy = policy_of(run.precision)
    lowered = policy is not None and policy.param is not None
    return lowered and capabilities_of(run.precision).holds_masters and not run.strategy.shards


def _devices(run: Run) -> int:
    return run.num_devices * run.num_nodes


def _split(run: Run) -> int:
    return run.strategy.settings.get("tensor_parallel_size", 1)


def _sizes(run: Run) -> dict[str, int]:
    """Return the sizes of groups of ranks that compute one batch, or that of tensor parallelism if there are none."""
    names = [f"{kind}_parallel_size" for kind in ("tensor", "context", "pipeline")]
    sizes = {name: run.strategy.settings.get(name, 1) for name in names}
    return {name: size for name, size in sizes.items() if size > 1} or {names[0]: 1}


def _group(run: Run) -> int:
    return prod(_sizes(run).values())


def _stages(run: Run) -> int:
    return run.strategy.settings.get("pipeline_parallel_size", 1)


def _copies(run: Run) -> int:
    return run.strategy.settings.get("replicate_size", 1)


def _sharded_over(run: Run) -> int:
    return max(_devices(run) // (_split(run) * _copies(run)), 1)


def _styles(run: Run) -> dict[str, str]:
    """Return how tensor parallelism splits each module, or nothing if the plan is invalid, which has its own error."""
    plan = run.strategy.settings.get("tensor_parallel_plan")
    if plan is None:
        return {}
    try:
        return {**styles_of(run.module, plan=plan_of(run.module, plan), size=_split(run))}
    except ValueError:
        return {}


def _read_split(run: Run) -> list[tuple[str, str]]:
    """Return (module, reader) for each split module whose weight is read without calling its forward."""
    styles = _styles(run)
    return [
        (name, f"{type(module).__name__} with {setting}")
        for owner, module in (run.module.named_modules() if styles else ())
        if isinstance(module, ReadsPastForward)
        for child, setting in module.read_past_forward.items()
        if (name := f"{owner}.{child}".removeprefix(".")) in styles
    ]


def _is_sharded(run: Run) -> bool:
    return is_sharded(run.module) or is_parametrised(run.module)


def _shards_itself(run: Run) -> bool:
    return run.strategy.ours and run.strategy.shards


def _wrapped(run: Run, kind: str) -> list[str]:
    # By name: importing the class would import the compiler, or an unused kind of parallelism.
    return [name for name, m in run.module.named_modules() if name and type(m).__name__ == kind]


def _whole(run: Run) -> list[str]:
    return [type(step).__name__ for step in run.declarations if step.compiles_whole]


def _not_whole(run: Run) -> list[str]:
    return [f"{type(step).__name__}({step.not_as_whole})" for step in run.declarations if step.not_as_whole]


def _without_random_numbers(run: Run) -> str | None:
    """Return the backend that draws new random numbers in a recomputed graph, or None."""
    if not any(step.stage is Stage.RECOMPUTE and not step.needs_compile for step in run.declarations):
        return None
    return next((each for each in _backends(run) if each in ("eager", "eager_noexcept", "eager_debug")), None)


def _unbudgeted(run: Run) -> list[tuple[str, str]]:
    """Return (callback with a memory budget, backend that ignores it)."""
    asking = [type(step).__name__ for step in run.declarations if step.memory_budget is not None]
    return [(each, backend) for each in asking for backend in _backends(run) if not heeds_memory_budget(backend)]


def _backends(run: Run) -> list[str]:
    return [compilation.backend for compilation in _compilations(run)]


def _compilations(run: Run) -> list[Compilation]:
    return [step.compilation for step in run.declarations if step.compilation is not None]


def _compilation_off() -> str | None:
    from lightning_ups._compat.torch.compile import dynamo  # the compiler: imported only if needed

    return dynamo.is_off()


def _uncompilable(run: Run) -> str | None:
    return capabilities_of(run.precision).excludes_compile


def _breaks_graphs(run: Run) -> bool:
    return capabilities_of(run.precision).breaks_graphs


def _in_one_graph(run: Run) -> str | None:
    if run.strategy.whole_graph:
        return run.strategy.name
    return "Compile(fullgraph=True)" if any(each.fullgraph for each in _compilations(run)) else None


def _must_compile(run: Run) -> bool:
    return any(run.strategy.whole_graph or each.must_succeed for each in _compilations(run))


def _graphed(run: Run) -> list[str]:
    return [type(step).__name__ for step in run.declarations if step.replays_cuda_graphs]


def offloading(declarations: Iterable[Step]) -> list[str]:
    """Return the names of steps that offload what blocks save, which does not work inside one graph."""
    return [type(step).__name__ for step in declarations if step.stage is Stage.OFFLOAD]


def one_graph(run: Run) -> list[str]:
    """Return the names of what compiles whole models as one graph, or replays CUDA graphs."""
    prefers = not run.strategy.shards and not offloading(run.declarations)
    preferring = [type(step).__name__ for step in run.declarations if step.prefers_whole and prefers]
    return [*_whole(run), *preferring, *_graphed(run), *([run.strategy.name] if run.strategy.whole_graph else [])]


def _uncompiled(run: Run) -> list[str]:
    if run.strategy.whole_graph or any(step.stage is Stage.COMPILE for step in run.declarations):
        return []
    return [type(step).__name__ for step in run.declarations if step.needs_compile]


def _captures(run: Run) -> bool:
    return run.training and any(getattr(callback, "captures_step", False) for callback in run.callbacks)


def _emulates(run: Run) -> bool:
    return all(c.emulate for c in run.callbacks if getattr(c, "captures_step", False))  # type: ignore[attr-defined]


def overridden(module: LightningModule, callbacks: Iterable[Callback], hooks: Sequence[str]) -> list[str]:
    """Return ``hooks`` of the module and of callbacks of others, by class."""
    owners = [(module, LightningModule), *[(c, Callback) for c in callbacks if not _is_ours(c)]]
    return [
        f"{type(owner).__name__}.{hook}"
        for owner, parent in owners
        for hook in hooks
        if hasattr(parent, hook) and is_overridden(hook, owner, parent=parent)
    ]


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("lightning_ups.")


def _hooks_inside(run: Run) -> list[str]:
    inside = overridden(run.module, run.callbacks, _IN_BACKWARD)
    return [*inside, *overridden(run.module, (), ("optimizer_zero_grad",))]


def _constants_read(run: Run) -> list[str]:
    return names_read(run.module, "training_step", _CONSTANTS)


def _working_on_host(run: Run) -> list[str]:
    return [type(callback).__name__ for callback in run.callbacks if type(callback).__name__ in _ON_HOST]


def _graphs_of_compile(run: Run) -> list[str]:
    return [
        type(step).__name__
        for step in run.declarations
        if step.replays_cuda_graphs or getattr(step, "chooses_mode", False)
    ]


def _has_plain_precision(precision: Precision) -> bool:
    if isinstance(precision, HasCapabilities):
        plain = type(precision).__name__ in ("BF16Precision", "PolicyPrecision")
        return plain and not capabilities_of(precision).holds_masters
    if isinstance(precision, MixedPrecision):
        return precision.scaler is None
    return precision.precision in ("32-true", "bf16-true", "64-true")
