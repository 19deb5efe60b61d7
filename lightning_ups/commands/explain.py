"""``explain``: show what a configuration does, the order of its steps, its blocks, and all refusals."""

from collections.abc import Callable, Iterator
from functools import partial

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups.commands.plan import planner_of
from lightning_ups.config.output import readable_count, titled
from lightning_ups.config.requested_run import RequestedRun
from lightning_ups.insight.memory import MOVES_NOTHING, Uncountable
from lightning_ups.order import PolicyPrecision, Run, Stage, policy_of, refusals
from lightning_ups.transforms.blocks import find_blocks, select_blocks, select_parameters
from lightning_ups.transforms.simple_fsdp import check_parametrisable, is_parametrised
from lightning_ups.transforms.tensor_parallel import plan_of, styles_of


def show(requested: RequestedRun) -> int:
    """Print what `requested` does. Return 0, or 2 if some of it is refused."""
    refused, notes = [*_refused(requested.run)], [*requested.notes]
    _check_offloading(requested, refused, notes)
    for title, lines in (
        ("run", _essentials(requested)),
        ("blocks", _blocks(requested.run.module)),
        ("order", _order(requested)),
        ("notes", notes),
        ("refused", refused or ["nothing"]),
    ):
        for line in titled(title, lines):
            print(line)
    return 2 if refused else 0


def _essentials(requested: RequestedRun) -> Iterator[str]:
    run, module = requested.run, requested.run.module
    parameters = [*module.parameters()]
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    yield (
        f"{type(module).__module__}.{type(module).__qualname__},"
        f" {readable_count(sum(parameter.numel() for parameter in parameters))} parameters"
        f"{f', {readable_count(frozen)} of them frozen' if frozen else ''}"
    )
    nodes = f" on each of {run.num_nodes} nodes" if run.num_nodes > 1 else ""
    yield f"{run.strategy.name}, {run.num_devices} x {run.accelerator}{nodes}"
    yield _precision(run.precision)
    if requested.preset:
        yield f"with the preset {requested.preset}"


def _precision(precision: Precision) -> str:
    policy = policy_of(precision)
    name = f"{type(precision).__name__} ({precision.precision})"
    if policy is None:
        return name
    dtypes = {"computes in": policy.param, "reduces in": policy.reduce, "returns": policy.output}
    parts = [f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in dtypes.items() if dtype is not None]
    in_float32 = f"; {', '.join(policy.in_float32)} in float32" if policy.in_float32 else ""
    return f"{name}: {', '.join(parts)}{in_float32}" if parts else name


def _blocks(module: LightningModule) -> Iterator[str]:
    names: dict[type, list[str]] = {}
    for name, block in find_blocks(module).items():
        names.setdefault(type(block), []).append(name)
    for kind, found in names.items():
        yield f"{len(found)} x {kind.__name__}: {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "")
    if not names:
        yield "none: no submodule has a forward and parameters"


def _order(requested: RequestedRun) -> Iterator[str]:
    steps: dict[Stage, list[str]] = {stage: [] for stage in Stage}
    run = requested.run
    if type(run.precision).convert_module is not Precision.convert_module:
        steps[Stage.CONVERT].append(type(run.precision).__name__)
    if run.strategy.shards:
        steps[Stage.SHARD].append(run.strategy.name)
    for step in sorted(run.declarations, key=lambda step: step.stage):
        if (label := requested.label(step)) is not None:
            steps[step.stage].append(label)
    made_by = f"{type(run.module).__name__}.configure_optimizers"
    section = requested.optimizer and f"{requested.optimizer.rpartition('.')[2]} (section 'optimizer')"
    steps[Stage.OPTIMIZERS].insert(0, section or made_by)
    if run.strategy.whole_graph and not steps[Stage.COMPILE]:
        steps[Stage.COMPILE].append(run.strategy.name)
    own = is_overridden("configure_model", run.module)
    yield f"{'configure_model':16} {type(run.module).__name__ if own else '-'}"
    for stage, labels in steps.items():
        yield f"{stage.name.lower():16} {', '.join(labels) or '-'}"


def _refused(run: Run) -> Iterator[str]:
    for refusal in refusals(run):
        yield refusal.text(run)
    if isinstance(run.precision, PolicyPrecision) and (text := run.precision.refusal(run)) is not None:
        yield text
    if run.strategy.whole_graph and not is_parametrised(run.module):
        try:
            check_parametrisable(run.module)
        except ValueError as error:
            yield str(error)
    settings, module = run.strategy.settings, run.module
    plan, size = settings.get("tensor_parallel_plan"), settings.get("tensor_parallel_size", 1)
    yield from _errors(
        run.strategy.name,
        lambda: select_blocks(module, settings.get("blocks")),
        lambda: select_parameters(module, settings.get("outside", ())),
        lambda: plan and styles_of(module, plan=plan_of(module, plan), size=size),
    )
    for step in run.declarations:
        patterns = getattr(step, "blocks", None) or ()
        yield from _errors(type(step).__name__, *(partial(select_blocks, module, [pattern]) for pattern in patterns))


def _check_offloading(requested: RequestedRun, refused: list[str], notes: list[str]) -> None:
    """Run a step on fake tensors if activations are offloaded, and add a line if that would move nothing."""
    offloading = [step for step in requested.run.declarations if step.moves_saved]
    if not offloading or refused:
        return
    try:
        if planner_of(requested, prepares_data=False)[0].moves_nothing():
            is_error = all(step.on_no_effect == "raise" for step in offloading)
            (refused if is_error else notes).append(MOVES_NOTHING)
    except (Uncountable, ValueError) as error:
        notes.append(f"Whether ActivationOffload moves anything is unknown here: {error}")


def _errors(owner: str, *checks: Callable[[], object]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield f"{owner}: {error}"
