"""What a run will take of a GPU's memory, what fits, and what to write instead; no GPU is needed."""

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_ups.config.output import WIDTH, note, readable_count, titled
from lightning_ups.config.requested_run import RequestedRun
from lightning_ups.config.suggestions import parse_own_options
from lightning_ups.insight.memory import (
    DEVICES,
    GIB,
    MOST,
    MOVES_NOTHING,
    Device,
    Moment,
    Planner,
    Uncountable,
    Variant,
    device_of,
    readable,
)
from lightning_ups.order import policy_of, refusals
from lightning_ups.transforms.quoted import quoted, several

OPTIONS = ("batch", "devices", "gpu", "json", "nodes")  # as typed


class _Row(NamedTuple):
    variant: Variant
    moment: Moment | None
    batch: int | None
    sequence: int | None
    why: str = ""


def own_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ``plan``, and the words that are options of ``fit``."""
    own, rest = parse_own_options(_parser(), words)
    for option, key in (("devices", "trainer.devices"), ("nodes", "trainer.num_nodes")):
        if getattr(own, option) is not None:
            rest += [f"--{key}", str(getattr(own, option))]
    return {"gpu": own.gpu, "batch": own.batch, "as_json": own.json}, rest


def gpu_of(own: Mapping[str, Any]) -> tuple[str, tuple[int, int]] | None:
    """Return name and compute capability of ``--gpu``, by which ``preset: auto`` chooses; None: of this machine."""
    device = _device(own["gpu"]) if own["gpu"] else None
    return device and (device.name, device.capability)


def main(words: Sequence[str]) -> int | None:
    """Print the list of GPUs, if it is requested; None: a configuration is needed."""
    own, _ = parse_own_options(_parser(), words)
    if own.gpu == "list":
        print("\n".join(f"{key:16}{device.gib:7.1f} GiB  {device.name}" for key, device in DEVICES.items()))
        return 0
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups plan",
        description="Predict the memory of a configuration, without a GPU: what fits, and what to change.",
        epilog="All options of fit are taken as well, such as --config run.yaml.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="a name of the table, or GiB; 'list' prints the table. The preset auto follows it"
    )
    parser.add_argument("--devices", metavar="N", help="GPUs in each node, in place of trainer.devices")
    parser.add_argument("--nodes", metavar="M", help="nodes, in place of trainer.num_nodes")
    parser.add_argument(
        "--batch", metavar="SHAPES", help="what training_step gets, where the data is elsewhere, as in 4x4097:int64"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def show(requested: RequestedRun, *, gpu: str | None = None, batch: str | None = None, as_json: bool = False) -> int:
    """Print the plan of ``requested``, and return 0, or 2 if it does not fit or cannot be counted.

    Without a ``gpu``, it is for the one of this machine, if there is one; without a ``batch``, for the data's first.
    """
    planner, origin = planner_of(requested, device=_device(gpu), batch=batch)
    # Each is a step or more on tensors without numbers, compiled where the run is: seconds, and for some a minute.
    note(f"plan: {planner.declared.name}")
    rows = [_row(planner, planner.declared, exact=True)]
    if rows[0].moment is None:
        raise Uncountable(rows[0].why)
    variants = [*planner.variants()]
    note(f"plan: {next(_verdict(planner, rows[0]))}")
    for number, variant in enumerate(variants, 1):
        note(f"plan: {variant.name} ({number} of {len(variants)})")
        rows.append(_row(planner, variant))
    useless = [row.variant.name for row in rows[1:] if _is_useless(row, than=rows[0])]
    rows = [row for row in rows if row.variant.name not in useless]
    if as_json:
        print(json.dumps(_facts(planner, rows, origin), indent=1))
    else:
        print(*_lines(requested, planner, rows, origin, useless), sep="\n")
    return 0 if planner.usable is None or planner.fits(planner.declared) else 2


def planner_of(
    requested: RequestedRun, *, device: Device | None = None, batch: str | None = None, prepares_data: bool = True
) -> tuple[Planner, str]:
    """Return what plans ``requested`` with ``batch`` or the first one of its data, and where the batch is from.

    Args:
        requested: The run.
        device: The GPU to plan for.
        batch: The batch, as ``--batch`` describes it.
        prepares_data: Whether ``prepare_data`` of a datamodule is called, which may download.

    Raises:
        ValueError: If there is no batch.
    """
    given, origin = _batch(requested, batch, prepares=prepares_data)
    planner = Planner(
        requested.run,
        given,
        settings=_strategy_settings(requested),
        optimizers=requested.make_optimizer,
        microbatches=int(requested.config["trainer"].get("accumulate_grad_batches") or 1),
        device=device,
    )
    return planner, origin


def _device(name: str | None) -> Device | None:
    if name is not None:
        if re.match(r"-[\d.]|nan$|[+-]?inf", name.lower()):
            raise ValueError(
                f"--gpu {name} is no size of a GPU. Use its GiB, as in --gpu 24, or its name, as in --gpu h100-80."
            )
        return device_of(name)
    return this_device()


def this_device() -> Device | None:
    """Return the first GPU of this machine, or None."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Device(
        name=properties.name, gib=properties.total_memory / GIB, capability=(properties.major, properties.minor)
    )


def _strategy_settings(requested: RequestedRun) -> dict[str, Any]:
    strategy = requested.config["trainer"].get("strategy")
    return dict(strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}


def _batch(requested: RequestedRun, spec: str | None, *, prepares: bool) -> tuple[Any, str]:
    """Return a batch, and where it is from."""
    if spec is not None:
        return read_batch(spec), "--batch"
    module = requested.run.module
    if requested.data is None and not is_overridden("train_dataloader", module):
        raise ValueError(
            "There is no data to take a batch from: the configuration has no section 'data'."
            " Say what training_step gets, such as plan --batch 4x4097:int64."
        )
    source = type(module).__name__
    try:
        if requested.data is None:
            return _first_batch(module, module), source
        source = "the section 'data'"
        data = requested.data()
        source = type(data).__name__
        if prepares:
            data.prepare_data()
        data.setup("fit")
        return _first_batch(data, module), source
    except Exception as error:
        raise ValueError(
            f"No batch could be taken from {source}: {quoted(error).rstrip('.')}."
            " Its files or its network may be on another machine."
            " Say what training_step gets, such as plan --batch 4x4097:int64."
        ) from error


def _first_batch(data: Any, module: LightningModule) -> Any:
    loaders = data.train_dataloader()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    for loader in combined.flattened:
        if getattr(loader, "num_workers", 0):
            loader.num_workers = 0  # one batch is not worth processes
            loader.prefetch_factor = None
    batch, _, _ = next(iter(combined))
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        has_hook = data if is_overridden(name, data, DataHooks) else module
        with suppress(AttributeError, RuntimeError):  # a hook may ask its Trainer, which is not there
            batch = getattr(has_hook, name)(batch, 0)
    return batch


def read_batch(spec: str) -> Any:
    """Return the empty batch that ``spec`` describes.

    A tensor is its sizes and its type, as in ``4x4097:int64``; without a type it is float32. Several with commas
    between them are a list, and with names a dict: ``images=8x3x224x224:float32,labels=8:int64``. A dict in a dict has
    dots in its names: ``heat.input=4x2x64x64,heat.time=4``.

    Raises:
        ValueError: If it is none.
    """
    parts = [part.rpartition("=")[::2] for part in spec.split(",")]
    tensors = [_tensor(text, spec) for _, text in parts]
    if any(name for name, _ in parts):
        return _nested(zip((name.strip() for name, _ in parts), tensors, strict=True), spec)
    return tensors if len(tensors) > 1 else tensors[0]


def _nested(named: Iterable[tuple[str, Tensor]], spec: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for name, tensor in named:
        *above, last = name.split(".")
        inner: Any = batch
        for key in above:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict) or not last or last in inner:
            raise _no_batch(spec, name)
        inner[last] = tensor
    return batch


def _tensor(text: str, spec: str) -> Tensor:
    sizes, _, name = text.strip().partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(s.isdecimal() and int(s) for s in sizes.split("x")):
        raise _no_batch(spec, text)
    return torch.empty([int(size) for size in sizes.split("x")], dtype=dtype, device="meta")


def _no_batch(spec: str, part: str) -> ValueError:
    return ValueError(
        f"--batch {spec!r} is no batch: {part!r} is not understood."
        " A tensor is its sizes with 'x' between them and, after a colon, its type; names with dots are dicts in dicts."
        " Write, for instance, --batch 4x4097:int64, or --batch images=8x3x224x224,labels=8:int64."
    )


def _row(planner: Planner, variant: Variant, *, exact: bool = False) -> _Row:
    try:
        moment = planner.moment(variant)
        batch = planner.largest_batch(variant)
    except Uncountable as error:
        return _Row(variant, None, None, None, str(error))
    if not exact:
        return _Row(variant, moment, batch, None)
    try:
        return _Row(variant, moment, batch, planner.longest_sequence(variant))
    except Uncountable as error:
        cause = error.__cause__ or error
        why = f"{str(cause).partition('. ')[0].rstrip('.') or type(cause).__name__}."
        return _Row(variant, moment, batch, None, why)


def _is_useless(row: _Row, *, than: _Row) -> bool:
    """Return whether a setting costs speed and saves next to nothing, as recomputing what is recomputed already."""
    if row.moment is None or than.moment is None or not row.variant.costs_speed:
        return False
    return than.moment.total - row.moment.total <= 0.01 * than.moment.total


def _lines(
    requested: RequestedRun, planner: Planner, rows: Sequence[_Row], origin: str, useless: Sequence[str]
) -> Iterator[str]:
    declared = rows[0].moment
    assert declared is not None
    yield from titled("run", _essentials(requested, planner, origin))
    yield from titled("memory", _parts(declared, _on_each(planner)))
    yield from titled("verdict", _verdict(planner, rows[0]))
    yield ""
    yield from _table(planner, rows)
    if change := _change(planner, rows):
        yield ""
        yield from change
    yield ""
    yield from titled("notes", [*_notes(requested, planner, useless), *requested.notes])
    if refused := [refusal.text(requested.run) for refusal in refusals(requested.run)]:
        yield from titled("refused", refused)


def _essentials(requested: RequestedRun, planner: Planner, origin: str) -> Iterator[str]:
    run = requested.run
    parameters = sum(p.numel() for p in run.module.parameters())
    policy = policy_of(run.precision)
    computes = f", computes in {str(policy.param).removeprefix('torch.')}" if policy and policy.param else ""
    yield f"{type(run.module).__name__}, {readable_count(parameters)} parameters"
    gpus = f"planned for {several(run.num_devices, 'GPU')}"
    nodes = f" on each of {run.num_nodes} nodes" if run.num_nodes > 1 else ""
    yield f"{run.strategy.name}, {gpus}{nodes}, {type(run.precision).__name__}{computes}"
    sequence = f" of {planner.tokens} positions" if planner.tokens else ""
    yield f"{several(planner.samples or 1, 'sample')}{sequence}{_on_each(planner)} (from {origin})"


def _on_each(planner: Planner) -> str:
    return " on each GPU" if planner.devices > 1 else ""


def _parts(moment: Moment, on_each: str) -> Iterator[str]:
    where = f"{moment.phase}{f' of {moment.place}' if moment.place else ''}"
    yield f"at most {readable(moment.total)}{on_each}, in {where}:"
    for kind, size in moment.by_kind().items():
        if size >= 0.005 * moment.total or size >= 0.1 * GIB:
            yield f"{readable(size):>9}  {kind}{_whose(moment, kind)}"
    if moment.on_host:
        yield f"{readable(moment.on_host)} of host memory{' for each GPU' if on_each else ''}"


def _whose(moment: Moment, kind: Any) -> str:
    if kind != "activations":
        return ""
    owners = moment.by_owner("activations")
    blocks = {name: size for name, size in owners.items() if name}
    said = []
    if blocks:
        most = max(blocks.values())
        said.append(f"{several(len(blocks), 'block')}, {readable(most)} the largest")
    if rest := owners.get("", 0):
        said.append(f"{readable(rest)} outside of blocks, such as logits and the loss")
    return f" ({'; '.join(said)})" if said else ""


def _verdict(planner: Planner, row: _Row) -> Iterator[str]:
    assert row.moment is not None
    if planner.device is None or planner.usable is None:
        needs, count = row.moment.total, planner.devices
        by_size = sorted(DEVICES.values(), key=lambda device: device.gib)
        enough = [each.name for each in by_size if needs + each.workspace <= each.usable(devices=count)]
        held = f"the smallest GPU of the table that holds it is {enough[0]}" if enough else "none of the table holds it"
        none_here = "" if torch.cuda.is_available() else "This machine has no GPU. "
        yield f"{none_here}No GPU is named: {held} (--gpu h100-80 names one; --gpu list shows the table)."
        return
    left = planner.usable - row.moment.total
    of = f"{planner.device.name}: {readable(planner.usable)} of {planner.device.gib:.1f} are usable"
    yield f"{of}, {f'it fits, {readable(left)} left' if left >= 0 else f'it does NOT fit, {readable(-left)} missing'}"
    if row.batch is not None:
        most = several(row.batch, "sample") if row.batch < MOST else "more than a million samples"
        yield f"largest batch at this length: {most}" if row.batch else "not even one sample fits"
    if row.sequence:
        yield f"longest sequence at this batch: {row.sequence} positions"
    elif row.why:
        yield f"longer sequences could not be run: {row.why}"


def _table(planner: Planner, rows: Sequence[_Row]) -> Iterator[str]:
    known = planner.usable is not None
    yield f"{'':34}{'peak':>10}{'saves':>10}{'  fits' if known else ''}{'  batch' if known else ''}  price"
    before = rows[0].moment
    assert before is not None
    for row in rows:
        if row.moment is None:
            said = row.why.partition(". ")[0].removeprefix(f"{row.variant.name} ")
            why = textwrap.shorten(f"not counted: {said}", WIDTH - 36, placeholder=" ...")
            yield f"{row.variant.name:34}  {why}"
            continue
        saves = "" if row is rows[0] else readable(before.total - row.moment.total)
        line = f"{row.variant.name:34}{readable(row.moment.total):>10}{saves:>10}"
        if known:
            fits = "yes" if row.moment.total <= (planner.usable or 0) else "no"
            batch = "-" if row.batch is None else ">10^6" if row.batch >= MOST else f"{row.batch}"
            line += f"{fits:>6}{batch:>7}"
        yield f"{line}  {row.variant.price}".rstrip()


def _change(planner: Planner, rows: Sequence[_Row]) -> list[str]:
    """Return what to write so that it fits: the cheapest setting that does alone."""
    if planner.usable is None or planner.fits(planner.declared):
        return []
    fitting = [row for row in rows[1:] if row.moment is not None and row.moment.total <= (planner.usable or 0)]
    if not fitting:
        return ["No single change makes it fit. Take several of the table together, or more or larger GPUs."]
    return [f"# so that it fits: {fitting[0].variant.name}", *fitting[0].variant.yaml.splitlines()]


def _notes(requested: RequestedRun, planner: Planner, useless: Sequence[str]) -> Iterator[str]:
    yield "Counted by running one step of this configuration on tensors without numbers, as torch's allocator counts."
    if requested.run.accelerator == "cpu":
        yield "This configuration trains on a CPU. The plan says what it would take on a GPU."
    if useless:
        yield f"Not in the table, since they save less than 1 % here: {', '.join(useless)}."
    if any(step.stage.name == "COMPILE" for step in requested.run.declarations):
        yield "Compiled code: what backward keeps is the compiler's own choice; what lies between products is fused."
    if getattr(requested.run.precision, "filter", None) == "auto":
        yield "filter='auto' is counted as filter='all': which layers win is measured on the GPU, when a fit begins."
    if planner.moves_nothing():
        yield MOVES_NOTHING
    if requested.run.strategy.shards and not requested.run.strategy.ours:
        yield (
            f"{requested.run.strategy.name} is counted as FSDP2Strategy would be; how it groups weights, and what the"
            " module splits by itself, is not known."
        )


def _facts(planner: Planner, rows: Sequence[_Row], origin: str) -> dict[str, Any]:
    return {
        "device": planner.device and {"name": planner.device.name, "gib": planner.device.gib},
        "usable_bytes": planner.usable,
        "devices": planner.devices,
        "batch": {"samples": planner.samples, "positions": planner.tokens, "from": origin},
        "settings": [
            {
                "name": row.variant.name,
                "peak_bytes": row.moment and row.moment.total,
                "host_bytes": row.moment and row.moment.on_host,
                "phase": row.moment and row.moment.phase,
                "by_kind": row.moment and row.moment.by_kind(),
                "activations_by_block": row.moment and row.moment.by_owner("activations"),
                "fits": None if planner.usable is None or row.moment is None else row.moment.total <= planner.usable,
                "largest_batch": row.batch,
                "longest_sequence": row.sequence,
                "price": row.variant.price,
                "yaml": row.variant.yaml,
                "not_counted": row.why or None,
            }
            for row in rows
        ],
    }
