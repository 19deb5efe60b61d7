"""The settings that `tune` tries: a table of axes, each with fragments of YAML and when they apply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any, Literal

import yaml

from lightning_ups.insight.tune.fragments import Tree, merged

Objective = Literal["throughput", "memory", "cost"]
Choice = Mapping[str, str]  # the name of a setting for each axis


# Counts of batches. `log_every_n_steps`, `max_steps` and schedulers count optimizer steps.
_IN_BATCHES = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that decide which axes and settings apply.

    Args:
        on_gpu: Whether the run is on CUDA devices.
        capability: The compute capability of the device.
        devices: The number of devices of the run.
        most_devices: The number of devices that a trial may use.
        explicit: The user's settings by dotted key; classes in lists by ``callbacks.NAME``.
        sets_precision: Whether the user chose the precision.
        data: The settings of the datamodule, with defaults.
        trainer: The settings of the Trainer, with defaults.
        typed: The user's settings that are options of the command line, which no file can replace.
        optimizer: The class of the section ``optimizer``.
        accumulated: Microbatches in an optimizer step.
        objective: What is improved.
        keeps_global_batch: Whether a given microbatch may be traded for accumulation.
        cores: CPU cores for each device.
        has_torchao: Whether torchao is installed.
    """

    on_gpu: bool = False
    capability: tuple[int, int] = (0, 0)
    devices: int = 1
    most_devices: int = 1
    explicit: Mapping[str, Any] = field(default_factory=dict)
    sets_precision: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    typed: Sequence[str] = ()
    optimizer: str | None = None
    accumulated: int = 1
    objective: Objective = "throughput"
    keeps_global_batch: bool = False
    cores: int = 1
    has_torchao: bool = False

    @property
    def batch(self) -> int | None:
        """The microbatch, if it may be changed at a fixed global batch."""
        size = self.data.get("batch_size")
        is_given = any(key in self.explicit for key in ("data.batch_size", "trainer.accumulate_grad_batches"))
        may_change = not self.typed_counts and (self.keeps_global_batch or not is_given)
        return size if type(size) is int and may_change else None

    @property
    def typed_counts(self) -> list[str]:
        """The options of the command line that would have to change with the microbatch or the number of devices."""
        counts = [f"trainer.{name}" for name in _IN_BATCHES if type(self.trainer.get(name)) is int]
        return [key for key in ("data.batch_size", "trainer.accumulate_grad_batches", *counts) if key in self.typed]

    @property
    def memory_matters(self) -> bool:
        """Whether a setting that only saves memory can be of use."""
        return self.objective == "memory" or (self.on_gpu and (self.batch is not None or self.most_devices > 1))


def _always(_: Situation) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of an axis: a fragment of YAML, empty for the stock setting, and when it applies."""

    name: str
    yaml: str = ""
    applies: Callable[[Situation], bool] = _always

    @property
    def tree(self) -> Tree:
        """The fragment as a tree."""
        return yaml.safe_load(self.yaml) or {}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Settings that exclude each other.

    Args:
        name: The axis.
        settings: The settings, the stock one first; or a function of the situation that returns them.
        start: The setting that the search starts with, if it applies; None: the first.
        applies: When the axis is searched.
        fixed_by: The user's settings that keep the axis fixed.
        is_given: When the user has chosen the setting in another way.
    """

    name: str
    settings: Sequence[Setting] | Callable[[Situation], Sequence[Setting]]
    start: str | None = None
    applies: Callable[[Situation], bool] = _always
    fixed_by: Sequence[str] = ()
    is_given: Callable[[Situation], bool] = lambda _: False

    def is_fixed(self, situation: Situation) -> bool:
        """Return whether the user's settings keep the axis fixed."""
        return self.is_given(situation) or any(key in situation.explicit for key in self.fixed_by)

    def of(self, situation: Situation) -> dict[str, Setting]:
        """Return the settings that apply, by name; fewer than two leave nothing to search."""
        if not self.applies(situation):
            return {}
        found = self.settings(situation) if callable(self.settings) else self.settings
        return {each.name: each for each in found if each.applies(situation)}


def _spec(name: str, settings: str) -> str:
    return f"{{class_path: {name}{f', init_args: {{{settings}}}' if settings else ''}}}"


def _callback(name: str, settings: str = "") -> str:
    return f"trainer: {{callbacks+: [{_spec(name, settings)}]}}"


def _precision(name: str, settings: str = "") -> str:
    return f"trainer: {{plugins+: [{_spec(name, settings)}]}}"


def _strategy(name: str, settings: str = "") -> str:
    return f"trainer: {{strategy: {_spec(name, settings)}}}"


def _micro_batches(situation: Situation) -> list[Setting]:
    size = situation.data["batch_size"]
    whole = size * situation.accumulated
    text = "{data: {init_args: {batch_size: %d}}}"
    sizes = [found for shift in (1, -1, 2, -2, 3) if (found := _shifted(size, shift)) and whole % found == 0]
    return [Setting(name=f"{size}"), *(Setting(name=f"{each}", yaml=text % each) for each in sizes)]


def _shifted(size: int, shift: int) -> int:
    return size << shift if shift > 0 else size >> -shift if size % (1 << -shift) == 0 else 0


def _workers(situation: Situation) -> list[Setting]:
    default = situation.data["num_workers"]
    counts = [count for count in (0, 2, 4, 8, 16) if count != default and count <= max(situation.cores, 2)]
    text = "data: {init_args: {num_workers: %d}}"
    return [Setting(name=f"{default}"), *(Setting(name=f"{count}", yaml=text % count) for count in counts)]


def _device_counts(situation: Situation) -> list[Setting]:
    counts = [1 << power for power in range(7) if 1 << power <= situation.most_devices]
    text = "trainer: {devices: %d}"
    others = [Setting(name=f"{each}", yaml=text % each) for each in counts if each != situation.devices]
    return [Setting(name=f"{situation.devices}"), *others]


def _on_gpu(situation: Situation) -> bool:
    return situation.on_gpu


def _has_bfloat16(situation: Situation) -> bool:
    return not situation.on_gpu or situation.capability >= (8, 0)


def _is_ampere(situation: Situation) -> bool:
    return situation.on_gpu and situation.capability >= (8, 0)


def _has_float8(situation: Situation) -> bool:
    return situation.on_gpu and situation.capability >= (8, 9) and situation.has_torchao


def _memory_matters(situation: Situation) -> bool:
    return situation.memory_matters


_FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")

AXES: tuple[Axis, ...] = (
    Axis(
        name="precision",
        settings=(
            Setting(name="float32"),
            Setting(name="bf16", yaml=_precision("BF16Precision")),
            Setting(name="bf16 masters", yaml=_precision("BF16Precision", "weights: masters"), applies=_on_gpu),
            Setting(name="bf16 weights", yaml=_precision("BF16WeightsPrecision"), applies=_on_gpu),
            Setting(
                name="float8 tensorwise",
                yaml=_precision("Float8Precision", "recipe: tensorwise, filter: auto, on_no_effect: warn"),
                applies=_has_float8,
            ),
            Setting(
                name="float8 tensorwise, all layers",
                yaml=_precision("Float8Precision", "recipe: tensorwise, on_no_effect: warn"),
                applies=_has_float8,
            ),
            Setting(
                name="float8 rowwise",
                yaml=_precision("Float8Precision", "recipe: rowwise, filter: auto, on_no_effect: warn"),
                applies=_has_float8,
            ),
        ),
        start="bf16",
        applies=_has_bfloat16,
        is_given=lambda situation: situation.sets_precision,
    ),
    Axis(
        name="compilation",
        settings=(
            Setting(name="none"),
            Setting(name="auto", yaml=_callback("Compile", "scope: auto, mode: auto")),
            Setting(name="auto, with losses", yaml=_callback("Compile", "scope: auto, mode: auto, losses: true")),
            Setting(name="blocks", yaml=_callback("Compile", "scope: blocks")),
            Setting(name="model", yaml=_callback("Compile", "scope: model")),
            Setting(name="CUDA graphs", yaml=_callback("Compile", "scope: model, mode: reduce-overhead")),
        ),
        start="auto",
        applies=_on_gpu,
        fixed_by=("callbacks.Compile",),
    ),
    Axis(
        name="attention",
        settings=(
            Setting(name="torch"),
            Setting(name="auto", yaml="flags: {attention: auto}"),
            Setting(name="cudnn", yaml="flags: {attention: [cudnn, flash, efficient, math]}"),
            Setting(name="flash", yaml="flags: {attention: [flash, efficient, math]}"),
        ),
        start="auto",
        applies=_is_ampere,
        fixed_by=("flags.attention", "flags"),
    ),
    Axis(
        name="TF32",
        settings=(Setting(name="off"), Setting(name="on", yaml="flags: {tf32: true}")),
        start="on",
        applies=_is_ampere,
        fixed_by=("flags.tf32", "flags"),
    ),
    Axis(
        name="allocator",
        settings=(
            Setting(name="default"),
            Setting(name="expandable segments", yaml="flags: {expandable_segments: true}"),
        ),
        start="expandable segments",
        applies=_on_gpu,
        fixed_by=("flags.expandable_segments", "flags"),
    ),
    Axis(
        name="microbatch",
        settings=_micro_batches,
        applies=lambda situation: type(situation.data.get("batch_size")) is int,
        is_given=lambda situation: situation.batch is None,
        fixed_by=("callbacks.GradientAccumulationScheduler", "callbacks.BatchSizeFinder"),
    ),
    Axis(
        name="recomputation",
        settings=(
            Setting(name="none"),
            Setting(name="matmuls kept", yaml=_callback("ActivationCheckpoint", "save: matmuls, on_no_effect: warn")),
            Setting(
                name="every second block",
                yaml=_callback("ActivationCheckpoint", "save: nothing, every_k: 2, on_no_effect: warn"),
            ),
            Setting(name="full", yaml=_callback("ActivationCheckpoint", "save: nothing, on_no_effect: warn")),
        ),
        applies=_memory_matters,
        fixed_by=("callbacks.ActivationCheckpoint",),
    ),
    Axis(
        name="sharding",
        settings=(
            Setting(name="as configured"),
            Setting(name="fsdp2", yaml=_strategy("FSDP2Strategy")),
            Setting(name="fsdp2, gradients", yaml=_strategy("FSDP2Strategy", "sharding: gradients")),
            Setting(name="fsdp2, reshard auto", yaml=_strategy("FSDP2Strategy", "reshard_after_forward: auto")),
            Setting(name="fsdp2, prefetch 2", yaml=_strategy("FSDP2Strategy", "prefetch: 2")),
            Setting(
                name="fsdp2, 2 replicas",
                yaml=_strategy("FSDP2Strategy", "replicate_size: 2"),
                applies=lambda situation: situation.devices > 2 and situation.devices % 2 == 0,
            ),
            Setting(name="simple_fsdp", yaml=_strategy("SimpleFSDPStrategy")),
        ),
        applies=lambda situation: situation.on_gpu and situation.devices > 1,
        fixed_by=("trainer.strategy",),
    ),
    Axis(
        name="optimizer step",
        settings=(
            Setting(name="default"),
            Setting(name="fused", yaml="optimizer: {init_args: {fused: true}}"),
            Setting(name="foreach", yaml="optimizer: {init_args: {foreach: true}}"),
        ),
        applies=lambda situation: (situation.optimizer or "") in {f"torch.optim.{name}" for name in _FUSABLE},
        fixed_by=("optimizer.fused", "optimizer.foreach"),
    ),
    Axis(
        name="optimizer state",
        settings=(
            Setting(name="device"),
            Setting(name="host", yaml=_callback("OptimizerOffload", "on_no_effect: warn")),
        ),
        applies=lambda situation: situation.on_gpu and situation.memory_matters,
        fixed_by=("callbacks.OptimizerOffload",),
    ),
    Axis(
        name="activations",
        settings=(
            Setting(name="device"),
            Setting(name="host", yaml=_callback("ActivationOffload", "on_no_effect: warn")),
        ),
        applies=lambda situation: situation.on_gpu and situation.memory_matters,
        fixed_by=("callbacks.ActivationOffload",),
    ),
    Axis(
        name="loader workers",
        settings=_workers,
        applies=lambda situation: type(situation.data.get("num_workers")) is int,
        fixed_by=("data.num_workers",),
    ),
    Axis(
        name="copies to the device",
        settings=(Setting(name="in the step"), Setting(name="ahead", yaml=_callback("DevicePrefetch"))),
        applies=_on_gpu,
        fixed_by=("callbacks.DevicePrefetch",),
    ),
    Axis(
        name="logging",
        settings=(Setting(name="at once"), Setting(name="late", yaml="flags: {late_logs: true}")),
        applies=_on_gpu,
        fixed_by=("flags.late_logs", "flags"),
    ),
    Axis(
        name="convolutions",
        settings=(Setting(name="default"), Setting(name="benchmark", yaml="flags: {cudnn_benchmark: true}")),
        applies=_on_gpu,
        fixed_by=("flags.cudnn_benchmark", "trainer.benchmark", "flags"),
    ),
    Axis(
        name="devices",
        settings=_device_counts,
        applies=lambda situation: situation.on_gpu and situation.objective == "cost" and not situation.typed_counts,
        fixed_by=("trainer.devices",),
    ),
)


class Space:
    """The axes of a situation, and the fragments of a choice."""

    def __init__(self, situation: Situation, axes: Sequence[Axis] | None = None) -> None:
        axes = AXES if axes is None else axes
        self._situation = situation
        self.fixed = [axis.name for axis in axes if axis.is_fixed(situation) and len(axis.of(situation)) > 1]
        free = [axis for axis in axes if not axis.is_fixed(situation)]
        self.settings = {axis.name: found for axis in free if len(found := axis.of(situation)) > 1}
        self.stock: Choice = {name: next(iter(found)) for name, found in self.settings.items()}
        starts = {axis.name: axis.start for axis in free}
        self.start: Choice = {
            name: start if (start := starts[name]) in found else self.stock[name]
            for name, found in self.settings.items()
        }

    @property
    def size(self) -> int:
        """The number of choices."""
        return prod(map(len, self.settings.values()))

    def parts(self, choice: Choice) -> Iterator[tuple[str, str, Tree]]:
        """Yield axis, setting and fragment of each setting that is not the stock one."""
        for axis, name in choice.items():
            if tree := self.settings[axis][name].tree:
                yield axis, name, tree

    def is_stock(self, choice: Choice | None) -> bool:
        """Return whether a choice is known to change nothing."""
        return choice is not None and not any(self.parts(choice))

    def tree(self, choice: Choice) -> Tree:
        """Return the fragment of a choice, with the counts of batches that keep the numbers of samples."""
        tree = merged(tree for *_, tree in self.parts(choice))
        if (shares := self._shares(tree)) != (1, 1):
            tree["trainer"] = tree.get("trainer", {}) | {
                name: int(count * Fraction(*shares)) for name, count in self._counts().items()
            }
        return tree

    def keeps_samples(self, choice: Choice) -> bool:
        """Return whether steps, epochs and times to validation can have as many samples as in the given run."""
        shares = Fraction(*self._shares(merged(tree for *_, tree in self.parts(choice))))
        return all(count * shares == int(count * shares) > 0 for count in self._counts().values())

    def _shares(self, tree: Tree) -> tuple[int, int]:
        """Return the samples of a batch of all devices in the given run, and in that with ``tree``, without factors."""
        facts = self._situation
        given = facts.batch or 1
        size = tree.get("data", {}).get("init_args", {}).get("batch_size", given)
        devices = tree.get("trainer", {}).get("devices", facts.devices)
        return Fraction(given * facts.devices, size * devices).as_integer_ratio()

    def _counts(self) -> dict[str, int]:
        """Return the settings of the Trainer that count batches; shares of an epoch and times stay as they are."""
        given = {name: self._situation.trainer.get(name) for name in _IN_BATCHES}
        counts = {name: count for name, count in given.items() if type(count) is int and count > 0}
        return {"accumulate_grad_batches": self._situation.accumulated, **counts}

    def neighbors(self, choice: Choice) -> Iterator[tuple[str, Choice]]:
        """Yield each choice that differs in one axis and keeps the numbers of samples, with the name of the axis."""
        for axis, found in self.settings.items():
            for name in found:
                if name != choice[axis] and self.keeps_samples(changed := {**choice, axis: name}):
                    yield axis, changed
