"""Every combination that cannot work, as data: raised before the first step, listed by ``explain``."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ups._compat.torch.compile.partitioner import heeds_memory_budget
from lightning_ups.order.applier import Step
from lightning_ups.order.capabilities import Compilation, OnlyOne, ReadsPastForward, capabilities_of, policy_of
from lightning_ups.order.policy import STOCK_POLICIES
from lightning_ups.order.run import Run
from lightning_ups.order.stage import Stage
from lightning_ups.transforms.blocks import select_blocks
from lightning_ups.transforms.fsdp import is_sharded
from lightning_ups.transforms.simple_fsdp import is_parametrised
from lightning_ups.transforms.tensor_parallel import plan_of, styles_of

__all__ = ["REFUSALS", "Refusal", "check", "offloading", "one_graph", "refusals", "refuse_precision", "refuse_second"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One row: when it holds, and what the user reads then. The texts may name what the run has."""

    what: Callable[[Run], str]
    why: str
    cure: str
    holds: Callable[[Run], bool]

    def text(self, run: Run) -> str:
        """Return what happened, why, and what to do."""
        return f"{self.what(run)} {self.why} {self.cure}"


_SECOND = Refusal(
    what=lambda run: f"Two callbacks of one class are given: {_second(run)[0]}.",
    why="Each follows the whole run from the same place in the Trainer, and they would be in each other's way.",
    cure="Keep one of them.",
    holds=lambda run: bool(_second(run)),
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
    why="FSDP2 casts parameters by a policy, and this precision casts in another way.",
    cure=f"Use one of {tuple(STOCK_POLICIES)}, or a precision of lightning_ups.",
    holds=lambda run: (
        run.strategy.ours
        and run.strategy.shards
        and policy_of(run.precision) is None
        and run.precision.precision not in ("16-mixed", "bf16-true")  # have rows of their own
    ),
)

_BF16_TRUE = Refusal(
    what=lambda run: f"precision='bf16-true' has no meaning under {run.strategy.name}.",
    why="FSDP2 casts parameters by a policy, and this precision casts the module itself.",
    cure=(
        "Use plugins=[BF16WeightsPrecision()], whose weights are bfloat16 too and whose optimizer rounds by chance, or"
        " precision='bf16-mixed', whose weights are float32."
    ),
    holds=lambda run: run.strategy.ours and run.strategy.shards and run.precision.precision == "bf16-true",
)

REFUSALS = (
    _SECOND,
    Refusal(
        what=lambda run: f"Two callbacks of one class are given: {_twice(run)[0]}.",
        why="Both would make the same change, and the second would act on the first's result.",
        cure="Keep one, and give it the patterns of both.",
        holds=lambda run: bool(_twice(run)),
    ),
    Refusal(
        what=lambda run: f"{' and '.join(_owners(run))} would both keep the optimizer's state.",
        why="Each replaces the optimizer by one whose state lies elsewhere, and state can lie in one place only.",
        cure="Keep one of them.",
        holds=lambda run: len(_owners(run)) > 1,
    ),
    Refusal(
        what=lambda run: f"{_averaging(run)[0]} is given with {type(run.precision).__name__}(weights='masters').",
        why="It would average bfloat16 copies of the weights, and write the result where the masters replace it.",
        cure="Use weights='autocast' in the precision.",
        holds=lambda run: run.training and _has_masters(run) and bool(_averaging(run)),
    ),
    Refusal(
        what=lambda run: f"{_rewinding(run)[0]} is given with {type(run.precision).__name__}(weights='masters').",
        why="It puts the weights of the beginning, which are float32, where the model's of bfloat16 are.",
        cure="Use use_lottery_ticket_hypothesis=False in the callback, or weights='autocast' in the precision.",
        holds=lambda run: run.training and _has_masters(run) and bool(_rewinding(run)),
    ),
    Refusal(
        what=lambda run: f"{_pruning(run)[0]} is given with {run.strategy.name}.",
        why="It ranks weights, and puts masked copies in their places; here each device holds a part of a weight.",
        cure="Prune before fit, or use strategy='ddp'.",
        holds=lambda run: run.training and _shards_itself(run) and bool(_pruning(run)),
    ),
    _FP16,
    _NO_POLICY,
    _BF16_TRUE,
    Refusal(
        what=lambda run: (
            f"{run.strategy.name}(tensor_parallel_size={_split(run)}, replicate_size={_copies(run)}) is given"
            f" for a run on {_devices(run)} {'device' if _devices(run) == 1 else 'devices'}."
        ),
        why="Every device has one place in the mesh, and all its rows are equally long.",
        cure="Choose sizes whose product divides the number of devices.",
        holds=lambda run: _devices(run) % (_split(run) * _copies(run)) != 0,
    ),
    Refusal(
        what=lambda run: (
            f"{run.strategy.name}(reshard_after_forward={run.strategy.settings['reshard_after_forward']}) is given"
            f" where parameters are sharded over {_sharded_over(run)}."
        ),
        why="What was gathered stays spread over groups of so many devices, all of one size.",
        cure="Use a number that divides it, or True or False.",
        holds=lambda run: (
            type(size := run.strategy.settings.get("reshard_after_forward")) is int and _sharded_over(run) % size != 0
        ),
    ),
    Refusal(
        what=lambda run: "{} would compile {}, and in it {}, an embedding that {} splits over devices.".format(
            *_compiled_embeddings(run)[0], run.strategy.name
        ),
        why="Each device has some of the rows, and what it leaves out for the others' is beyond torch.compile.",
        cure="Name blocks without it, such as those that repeat, which are compiled where none are named.",
        holds=lambda run: bool(_compiled_embeddings(run)),
    ),
    Refusal(
        what=lambda run: "tensor_parallel_plan of {} splits {}, and {} reads its weight past its forward.".format(
            run.strategy.name, *_read_split(run)[0]
        ),
        why="It needs the whole weight on each device, and only the forward knows of the split.",
        cure="Leave that setting of the model at its default.",
        holds=lambda run: bool(_read_split(run)),
    ),
    Refusal(
        what=lambda run: f"{_whole(run)[0]} would compile whole models under {run.strategy.name}.",
        why="The strategy gathers parameters in hooks of each block, and these would break the one graph.",
        cure="Use scope='blocks'.",
        holds=lambda run: run.strategy.shards and not run.strategy.whole_graph and bool(_whole(run)),
    ),
    Refusal(
        what=lambda run: f"{_not_whole(run)[0]} is given under {run.strategy.name}.",
        why=(
            "The strategy is code that is compiled with the model: only in one graph are the gathers of parameters"
            " put together, and hidden behind the work of other blocks."
        ),
        cure="Leave that out, or use FSDP2Strategy, which gathers in hooks.",
        holds=lambda run: run.strategy.whole_graph and bool(_not_whole(run)),
    ),
    Refusal(
        what=lambda run: f"{_compilation_off()} is set, and {run.strategy.name} is given.",
        why="Without torch.compile the strategy would gather every parameter by itself, and wait for each.",
        cure="Unset it, or use FSDP2Strategy.",
        holds=lambda run: run.strategy.whole_graph and _compilation_off() is not None,
    ),
    Refusal(
        what=lambda run: f"{_drawing(run)[0]}(log_graph=True) is given with {run.strategy.name}.",
        why="It runs the model on the first device alone, which would wait for what the others hold of it.",
        cure="Leave log_graph out, and draw the graph of a module that is not sharded.",
        holds=lambda run: run.training and _shards_itself(run) and bool(_drawing(run)),
    ),
    Refusal(
        what=lambda run: f"detect_anomaly=True is given with {run.strategy.name}.",
        why="It asks of each gradient whether it holds NaN, and those of shards have no such operation.",
        cure="Leave it out, or look for the anomaly with FSDP2Strategy, which trains the same.",
        holds=lambda run: run.training and run.strategy.whole_graph and run.detects_anomalies,
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__}(all_gather=True) is given under {run.strategy.name}.",
        why="It gathers weights in float8 by FSDP2's hooks, and the gathers of a graph know no types but torch's own.",
        cure="Leave all_gather out: weights are then gathered in bfloat16, and multiplied in float8 all the same.",
        holds=lambda run: run.strategy.whole_graph and capabilities_of(run.precision).wants_float8_gathers,
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__}(all_gather=True) is given under {run.strategy.name}.",
        why="It is about how FSDP2Strategy gathers weights, and would have no effect here.",
        cure="Leave all_gather out, or use FSDP2Strategy.",
        holds=lambda run: (
            run.training and not _shards_itself(run) and capabilities_of(run.precision).wants_float8_gathers
        ),
    ),
    Refusal(
        what=lambda run: f"{_graphed(run)[0]} would replay CUDA graphs under {run.strategy.name}.",
        why="A graph reads its weights at fixed addresses, and gathered parameters lie elsewhere each time.",
        cure="Use mode='default' or 'max-autotune-no-cudagraphs'.",
        holds=lambda run: run.strategy.shards and bool(_graphed(run)),
    ),
    Refusal(
        what=lambda run: (
            f"{one_graph(run)[0]} makes one graph of whole models or replays CUDA graphs, and"
            f" {offloading(run.declarations)[0]} is given."
        ),
        why="Inside one graph no block can hand over what it saves, and the memory of a replayed graph is its own.",
        cure="Use Compile(scope='blocks', mode='default') under a strategy of blocks, or leave the offloading out.",
        holds=lambda run: run.training and bool(offloading(run.declarations)) and bool(one_graph(run)),
    ),
    Refusal(
        what=lambda run: f"{_uncompiled(run)[0]} has a setting that acts only on compiled code, and nothing compiles.",
        why="It is a choice that the compiler makes when it splits a graph into forward and backward.",
        cure="Add Compile() to the callbacks, or choose a setting that works without it.",
        holds=lambda run: run.training and bool(_uncompiled(run)),
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__}({_uncompilable(run)}) is given with Compile.",
        why="Transformer Engine cannot do it in code that is compiled.",
        cure="Use recipe='current', without fp8_attention, or leave Compile out.",
        holds=lambda run: run.training and _uncompilable(run) is not None and run.compiles,
    ),
    Refusal(
        what=lambda run: f"{type(run.precision).__name__} is given with {_in_one_graph(run)}.",
        why="A graph ends before each module of Transformer Engine, and another begins after it.",
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
        why="That backend draws anew what it recomputes, so that dropout would get wrong gradients.",
        cure="Use backend='aot_eager' or the default, or leave one of the two callbacks out.",
        holds=lambda run: run.training and _without_random_numbers(run) is not None,
    ),
    Refusal(
        what=lambda run: "Compile(backend={1!r}) is given with {0}(memory_budget=...).".format(*_unbudgeted(run)[0]),
        why="The budget counts where a graph is split by cost, and that backend splits none, or in another way.",
        cure="Use the default backend or 'aot_eager', or say what is kept by save='matmuls' or another.",
        holds=lambda run: run.training and bool(_unbudgeted(run)),
    ),
    Refusal(
        what=lambda run: f"torch.compile({type(run.module).__name__}) was given to the Trainer, and Compile() as well.",
        why="The second compilation would be inside the first, and only one of them could be reported or undone.",
        cure="Pass the module as it is, and keep the callback.",
        holds=lambda run: run.compiled_by_user and _must_compile(run),
    ),
    Refusal(
        what=lambda run: (
            f"{type(run.module).__name__} was sharded by an earlier run, and {run.strategy.name} does not shard."
        ),
        why="Sharding stays on a module, and this strategy would train the shards as if they were whole.",
        cure="Keep the strategy of the earlier run, or build the module anew and load a checkpoint.",
        holds=lambda run: not run.strategy.shards and _is_sharded(run),
    ),
    Refusal(
        what=lambda run: f"torch.compile({type(run.module).__name__}) was given to {run.strategy.name}.",
        why="It would compile the module as one graph, in which the strategy's gathers of parameters have no place.",
        cure="Pass the module as it is, with the callback Compile().",
        # Without Compile(), which has a row of its own.
        holds=lambda run: run.compiled_by_user and _shards_itself(run) and not _must_compile(run),
    ),
    Refusal(
        what=lambda run: f"{_wrapped(run, 'OptimizedModule')[0]} is what torch.compile returned.",
        why="It renames every parameter inside: checkpoints would fit models that are compiled, and no others.",
        cure="Put the module itself there, with the callback Compile(blocks=[...]).",
        holds=lambda run: _shards_itself(run) and bool(_wrapped(run, "OptimizedModule")),
    ),
    Refusal(
        what=lambda run: (
            f"{(_wrapped(run, 'FullyShardedDataParallel') + _wrapped(run, 'DistributedDataParallel'))[0]}"
            " is wrapped for data parallelism already."
        ),
        why="Its gradients would be reduced twice, by two ways that do not know of each other.",
        cure="Put the module itself there, and let the strategy shard it.",
        holds=lambda run: (
            _shards_itself(run)
            and bool(_wrapped(run, "FullyShardedDataParallel") or _wrapped(run, "DistributedDataParallel"))
        ),
    ),
)


def refusals(run: Run) -> list[Refusal]:
    """Return everything in ``run`` that cannot be."""
    return [refusal for refusal in REFUSALS if refusal.holds(run)]


def check(run: Run) -> None:
    """Raise ValueError with the first refusal, if there is one."""
    _refuse(run, REFUSALS)


def refuse_second(run: Run) -> None:
    """Raise ValueError if a callback is given twice of which a Trainer can have one."""
    _refuse(run, [_SECOND])


def refuse_precision(run: Run) -> None:
    """Raise ValueError if the precision cannot be under the strategy.

    Before there is a Trainer, which would take another than the one that was asked for where a device has no such type.
    """
    _refuse(run, [_FP16, _NO_POLICY, _BF16_TRUE])


def _refuse(run: Run, rows: Iterable[Refusal]) -> None:
    for refusal in rows:
        if refusal.holds(run):
            raise ValueError(refusal.text(run))


def _second(run: Run) -> list[str]:
    return _repeated([callback for callback in run.callbacks if isinstance(callback, OnlyOne)])


def _twice(run: Run) -> list[str]:
    return _repeated(run.declarations)


def _repeated(callbacks: Iterable[object]) -> list[str]:
    """Return the classes of which several are among ``callbacks``, a subclass of one of ours being that one."""
    counts = Counter(_kind(type(callback)).__name__ for callback in callbacks)
    return [kind for kind, count in counts.items() if count > 1]


def _kind(given: type) -> type:
    ours = [base for base in given.__mro__ if base.__module__.startswith("lightning_ups.callbacks.")]
    return ours[-1] if ours else given


def _owners(run: Run) -> list[str]:
    return [type(step).__name__ for step in run.declarations if step.owns_optimizer_state]


def _averaging(run: Run) -> list[str]:
    return [type(c).__name__ for c in run.callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]


def _rewinding(run: Run) -> list[str]:
    return [type(c).__name__ for c in run.callbacks if isinstance(c, ModelPruning) and c._use_lottery_ticket_hypothesis]


def _pruning(run: Run) -> list[str]:
    return [type(c).__name__ for c in run.callbacks if isinstance(c, ModelPruning)]


def _drawing(run: Run) -> list[str]:
    if run.module.example_input_array is None:
        return []  # there is nothing to run it on
    return [type(each).__name__ for each in run.loggers if isinstance(each, TensorBoardLogger) and each._log_graph]


def _has_masters(run: Run) -> bool:
    policy = policy_of(run.precision)
    lowered = policy is not None and policy.param is not None
    return lowered and capabilities_of(run.precision).holds_masters and not run.strategy.shards


def _devices(run: Run) -> int:
    return run.num_devices * run.num_nodes


def _split(run: Run) -> int:
    return run.strategy.settings.get("tensor_parallel_size", 1)


def _copies(run: Run) -> int:
    return run.strategy.settings.get("replicate_size", 1)


def _sharded_over(run: Run) -> int:
    return max(_devices(run) // (_split(run) * _copies(run)), 1)


def _styles(run: Run) -> dict[str, str]:
    """Return how tensor parallelism splits each module, or nothing for a plan that does not fit: that tells itself."""
    plan = run.strategy.settings.get("tensor_parallel_plan")
    if plan is None:
        return {}
    try:
        return {**styles_of(run.module, plan=plan_of(run.module, plan), size=_split(run))}
    except ValueError:
        return {}


def _compiled_embeddings(run: Run) -> list[tuple[str, str, str]]:
    """Return (callback, block, embedding) for each split embedding that a block holds which must be compiled."""
    embeddings = [name for name, style in _styles(run).items() if style.startswith("embedding")]
    return [
        (type(step).__name__, block, name)
        for step in (run.declarations if embeddings else ())
        if (compilation := step.compilation) is not None and compilation.must_succeed
        for block in _blocks(run, compilation.blocks)
        for name in embeddings
        if f"{name}.".startswith(f"{block}.")
    ]


def _read_split(run: Run) -> list[tuple[str, str]]:
    """Return (module, what reads it) for each split module whose weight is read where its forward does not run."""
    styles = _styles(run)
    return [
        (name, f"{type(module).__name__} with {setting}")
        for owner, module in (run.module.named_modules() if styles else ())
        if isinstance(module, ReadsPastForward)
        for child, setting in module.read_past_forward.items()
        if (name := f"{owner}.{child}".removeprefix(".")) in styles
    ]


def _blocks(run: Run, patterns: Sequence[str] | None) -> Collection[str]:
    try:
        return select_blocks(run.module, patterns)
    except ValueError:
        return ()  # told where they are used


def _is_sharded(run: Run) -> bool:
    return is_sharded(run.module) or is_parametrised(run.module)


def _shards_itself(run: Run) -> bool:
    return run.strategy.ours and run.strategy.shards


def _wrapped(run: Run, kind: str) -> list[str]:
    # By name: asking for the class would import the compiler, or a parallelism that nobody uses.
    return [name for name, m in run.module.named_modules() if name and type(m).__name__ == kind]


def _whole(run: Run) -> list[str]:
    return [type(step).__name__ for step in run.declarations if step.compiles_whole]


def _not_whole(run: Run) -> list[str]:
    return [f"{type(step).__name__}({step.not_as_whole})" for step in run.declarations if step.not_as_whole]


def _without_random_numbers(run: Run) -> str | None:
    """Return the backend that does not keep what is drawn in a graph that is recomputed, if there is such a graph."""
    if not any(step.stage is Stage.RECOMPUTE and not step.needs_compile for step in run.declarations):
        return None
    return next((each for each in _backends(run) if each in ("eager", "eager_noexcept", "eager_debug")), None)


def _unbudgeted(run: Run) -> list[tuple[str, str]]:
    """Return (who asks for a memory budget, backend on which it has no effect)."""
    asking = [type(step).__name__ for step in run.declarations if step.memory_budget is not None]
    return [(each, backend) for each in asking for backend in _backends(run) if heeds_memory_budget(backend) is False]


def _backends(run: Run) -> list[str]:
    return [compilation.backend for compilation in _compilations(run)]


def _compilations(run: Run) -> list[Compilation]:
    return [step.compilation for step in run.declarations if step.compilation is not None]


def _compilation_off() -> str | None:
    from lightning_ups._compat.torch.compile import dynamo  # the compiler: imported for those who need it

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
    """Return the names of what moves what blocks save, which one graph of the model would not hand over."""
    return [type(step).__name__ for step in declarations if step.stage is Stage.OFFLOAD]


def one_graph(run: Run) -> list[str]:
    """Return the names of what makes one graph of whole models, or replays graphs."""
    prefers = not run.strategy.shards and not offloading(run.declarations)
    preferring = [type(step).__name__ for step in run.declarations if step.prefers_whole and prefers]
    return [*_whole(run), *preferring, *_graphed(run), *([run.strategy.name] if run.strategy.whole_graph else [])]


def _uncompiled(run: Run) -> list[str]:
    if run.strategy.whole_graph or any(step.stage is Stage.COMPILE for step in run.declarations):
        return []
    return [type(step).__name__ for step in run.declarations if step.needs_compile]
