"""What a configuration will do: its essentials, the one order, the blocks, and every refusal; nothing is trained."""

import textwrap
from collections.abc import Iterable, Iterator

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups.config.asked import Asked, counted
from lightning_ups.order import PolicyPrecision, Run, Stage, Step, policy_of, refusals
from lightning_ups.transforms.blocks import find_blocks, select_blocks, select_parameters
from lightning_ups.transforms.simple_fsdp import check_parametrisable, is_parametrised
from lightning_ups.transforms.tensor_parallel import plan_of, styles_of

__all__ = ["show"]


def show(asked: Asked) -> int:
    """Print what ``asked`` will do, and return 0, or 2 if something of it is refused."""
    refused = [*_refused(asked.run)]
    _print("run", _essentials(asked))
    _print("blocks", _blocks(asked.run.module))
    _print("order", _order(asked))
    _print("notes", asked.notes)
    _print("refused", refused or ["nothing"])
    return 2 if refused else 0


def _print(title: str, lines: Iterable[str]) -> None:
    for index, line in enumerate(lines):
        start = f"{title if index == 0 else '':9} "
        print(textwrap.fill(line, 110, initial_indent=start, subsequent_indent=" " * 12, break_on_hyphens=False))


def _essentials(asked: Asked) -> Iterator[str]:
    run, module = asked.run, asked.run.module
    parameters = [*module.parameters()]
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    yield (
        f"{type(module).__module__}.{type(module).__qualname__},"
        f" {counted(sum(parameter.numel() for parameter in parameters))} parameters"
        f"{f', {counted(frozen)} of them frozen' if frozen else ''}"
    )
    nodes = f" on each of {run.num_nodes} nodes" if run.num_nodes > 1 else ""
    yield f"{run.strategy.name}, {run.num_devices} x {run.accelerator}{nodes}"
    yield _precision(run.precision)
    if asked.preset:
        yield f"over the preset {asked.preset}"


def _precision(precision: Precision) -> str:
    policy = policy_of(precision)
    types = (
        {"computes in": policy.param, "reduces in": policy.reduce, "returns": policy.output}
        if policy is not None
        else {}
    )
    said = ", ".join(
        f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in types.items() if dtype is not None
    )
    kept = f"; {', '.join(policy.in_float32)} in float32" if policy is not None and policy.in_float32 else ""
    return f"{type(precision).__name__} ({precision.precision})" + (f": {said}{kept}" if said else "")


def _blocks(module: LightningModule) -> Iterator[str]:
    names: dict[type, list[str]] = {}
    for name, block in find_blocks(module).items():
        names.setdefault(type(block), []).append(name)
    for kind, found in names.items():
        yield f"{len(found)} x {kind.__name__}: {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "")
    if not names:
        yield "none: no submodule of the module has a forward and parameters"


def _order(asked: Asked) -> Iterator[str]:
    steps: dict[Stage, list[str]] = {stage: [] for stage in Stage}
    run = asked.run
    if type(run.precision).convert_module is not Precision.convert_module:
        steps[Stage.CONVERT].append(type(run.precision).__name__)
    if run.strategy.shards:
        steps[Stage.SHARD].append(run.strategy.name)
    for step in sorted(run.declarations, key=lambda step: step.stage):
        if (label := asked.label(step)) is not None:
            steps[step.stage].append(label)
    made_by = f"{type(run.module).__name__}.configure_optimizers"
    section = asked.optimizer and f"{asked.optimizer.rpartition('.')[2]} of the section 'optimizer'"
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
    yield from _misfits(run)
    for step in run.declarations:
        yield from _unmatched(step, run.module)


def _misfits(run: Run) -> Iterator[str]:
    """Yield what of the strategy's settings does not fit the module."""
    settings, module = run.strategy.settings, run.module
    plan, size = settings.get("tensor_parallel_plan"), settings.get("tensor_parallel_size", 1)
    for fit in (
        lambda: select_blocks(module, settings.get("blocks")),
        lambda: select_parameters(module, settings.get("outside", ())),
        lambda: plan and styles_of(module, plan=plan_of(module, plan), size=size),
    ):
        try:
            fit()
        except ValueError as error:
            yield f"{run.strategy.name}: {error}"


def _unmatched(step: Step, module: LightningModule) -> Iterator[str]:
    patterns = getattr(step, "blocks", None)
    for pattern in patterns or ():
        try:
            select_blocks(module, [pattern])
        except ValueError as error:
            yield f"{type(step).__name__}: {error}"
