"""What a configuration asks for, as far as it can be known on a machine that is not the one asked for."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ups.config.errors import unwrapped
from lightning_ups.config.layers import items
from lightning_ups.config.spelling import suggestion
from lightning_ups.order import Placement, Run, refuse_precision
from lightning_ups.transforms.quoted import first_line

__all__ = [
    "Asked",
    "build",
    "check_accelerator",
    "check_precision",
    "check_slots",
    "check_strategy",
    "configured",
    "counted",
    "elsewhere",
    "made",
    "run_of",
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A parsed configuration, and the run that it describes.

    Args:
        run: The run; its module may be on the meta device.
        optimizer: The class that the section ``optimizer`` names, if it is there.
        config: All settings, after presets and defaults, as YAML would hold them.
        slots: The sections of callbacks that have one, by the names of their classes.
        preset: The preset below them, if there is one.
        notes: What could not be known here.
        data: Makes the datamodule, if there is one.
        make_optimizer: Makes the optimizer of the section ``optimizer`` for a module, if it is there.
    """

    run: Run
    optimizer: str | None
    config: Mapping[str, Any]
    slots: Mapping[str, str]
    preset: str | None = None
    notes: Sequence[str] = ()
    data: Callable[[], Any] | None = None
    make_optimizer: Callable[[Any], Any] | None = None

    def label(self, part: object) -> str | None:
        """Return the class of a part and the settings that differ from its defaults; None for a section left alone."""
        name = type(part).__name__
        section = self.slots.get(name)
        settings = self.config.get(section, {}) if section else self._init_args(part)
        parameters = inspect.signature(type(part)).parameters
        told = {key: value for key, value in settings.items() if key in parameters and value != parameters[key].default}
        if section and not told:
            return None
        return f"{name}({', '.join(f'{key}={value}' for key, value in told.items())})"

    def _init_args(self, part: object) -> Mapping[str, Any]:
        trainer, name = self.config["trainer"], type(part).__name__
        given = [
            spec.get("init_args") or {}
            for spec in (*items(trainer["callbacks"]), *items(trainer["plugins"]), trainer["strategy"])
            if isinstance(spec, dict) and spec["class_path"].rpartition(".")[2] == name
        ]
        alike = [each for each in self.run.declarations if type(each).__name__ == name]
        position = next((index for index, each in enumerate(alike) if each is part), 0)
        return given[position] if position < len(given) else {}


def build(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what ``make`` does on the meta device, where weights take no memory, or on the CPU if it needs values."""
    try:
        with torch.device("meta"):
            return make(), []
    except Exception as error:
        root = unwrapped(error)  # the parser wraps what a class raised in an error of its own
        if not isinstance(root, (NotImplementedError, RuntimeError)) or "meta" not in str(root):
            raise
    return make(), ["The module needs values while it is built, so that it was built on the CPU."]


def counted(number: int) -> str:
    """Return ``number`` as people say it, such as 1.5 B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def made(spec: Any) -> Any:
    """Return what ``spec``, as YAML has it, stands for: an object for each ``class_path``, whatever is in it first."""
    if isinstance(spec, list):
        return [made(each) for each in spec]
    if not isinstance(spec, dict):
        return spec
    inner = {key: made(value) for key, value in spec.items()}
    return instantiate_class((), inner) if "class_path" in inner else inner


def configured(module: LightningModule) -> list[str]:
    """Call ``configure_model``, which may build the blocks, and return why this was not possible."""
    if not is_overridden("configure_model", module):
        return []
    try:
        with torch.device("meta"):
            module.configure_model()
    except (NotImplementedError, RuntimeError) as error:
        return [f"configure_model needs what is not here, so that what it builds is unknown: {first_line(error)}"]
    return []


def run_of(module: LightningModule, trainer: Mapping[str, Any], callbacks: Sequence[Callback]) -> Run:
    """Return the run of ``module`` with the arguments of a Trainer, which is not made.

    Raises:
        ValueError: If two plugins are given for one slot, a strategy is unknown, no device takes part, or what is
            counted in batches or epochs is counted in none.
    """
    check_slots(trainer)
    _check_counts(trainer)
    check_accelerator(trainer["accelerator"], here=False)
    accelerator = _accelerator(trainer["accelerator"])
    num_devices, num_nodes = _num_devices(trainer["devices"], accelerator), trainer["num_nodes"]
    strategy = _strategy(trainer["strategy"], parallel=num_devices * num_nodes > 1)
    return Run(
        module=module,
        strategy=Placement.of(strategy),
        precision=_precision(trainer, strategy, accelerator),
        callbacks=(*items(trainer["callbacks"]), *callbacks),
        accelerator=accelerator,
        num_devices=num_devices,
        num_nodes=num_nodes,
        detects_anomalies=bool(trainer.get("detect_anomaly")),
        loggers=tuple(items(trainer.get("logger"))),
    )


def _check_counts(trainer: Mapping[str, Any]) -> None:
    never = " To validate never, set limit_val_batches to 0."
    for name, counted, cure in (
        ("accumulate_grad_batches", "how many batches make an optimizer step", "1, or more."),
        ("val_check_interval", "after how many batches to validate", f"1.0, for the end of an epoch, or more.{never}"),
        ("check_val_every_n_epoch", "after how many epochs to validate", f"1, or more.{never}"),
    ):
        value = trainer.get(name)
        if type(value) is int and value < 1:  # the Trainer would divide by it, amid the fit
            raise ValueError(f"trainer.{name} is {value}. It says {counted}. Use {cure}")


def check_slots(trainer: Mapping[str, Any]) -> None:
    """Refuse two precisions.

    Raises:
        ValueError: If ``precision`` and a plugin, or two plugins, say in what type to compute.
    """
    given = [type(plugin).__name__ for plugin in items(trainer.get("plugins")) if isinstance(plugin, Precision)]
    if trainer.get("precision") is not None:
        given.insert(0, f"trainer.precision={trainer['precision']}")
    if len(given) > 1:
        raise ValueError(
            f"Two precisions are given: {' and '.join(given)}. A Trainer has one slot for the type that it computes in,"
            " and trainer.precision and a precision among trainer.plugins are two ways to fill it. Keep one of them."
        )


def check_precision(module: LightningModule, trainer: Mapping[str, Any]) -> None:
    """Refuse a precision that the strategy cannot have, where a Trainer on this machine might take another instead.

    Raises:
        ValueError: If it is none of those that a strategy of this package knows.
    """
    refuse_precision(run_of(module, trainer, ()))


def check_strategy(strategy: Any) -> None:
    """Refuse a name that no strategy has.

    Raises:
        ValueError: If there is no such strategy.
    """
    known = StrategyRegistry.available_strategies()
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *known):
        raise ValueError(
            f"There is no strategy {strategy!r}. A strategy is given by its registered name or by class_path."
            f" {suggestion(strategy, ['auto', *known], most=40)}"
        )


def check_accelerator(accelerator: Any, *, here: bool) -> None:
    """Refuse a name that no accelerator has and, if the run is to be ``here``, a GPU where there is none.

    Raises:
        ValueError: If there is no such accelerator.
        RuntimeError: If this machine has none.
    """
    known = ["auto", "gpu", *AcceleratorRegistry.available_accelerators()]
    if isinstance(accelerator, str) and accelerator not in known:
        raise ValueError(
            f"There is no accelerator {accelerator!r}. It is the kind of device to run on."
            f" {suggestion(accelerator, known)}"
        )
    if (
        here
        and accelerator in ("gpu", "cuda")
        and not torch.cuda.is_available()
        and not torch.backends.mps.is_available()
    ):
        built = torch.version.cuda or torch.version.hip
        raise RuntimeError(
            f"trainer.accelerator is {accelerator!r}, and torch finds no GPU here."
            f" {'Its driver or CUDA_VISIBLE_DEVICES hides it.' if built else 'This torch is built for CPUs only.'}"
            " Use --trainer.accelerator auto, or look with `doctor`; `explain` needs no GPU."
        )


def elsewhere(accelerator: Any) -> list[str]:
    """Return a note if a run on ``accelerator`` is refused on this machine, whatever another would make of it."""
    try:
        check_accelerator(accelerator, here=True)
    except RuntimeError as error:
        return [f"fit needs another machine: {str(error).partition('. ')[0]}."]
    return []


def _strategy(strategy: Strategy | str, *, parallel: bool) -> Strategy | type[Strategy]:
    check_strategy(strategy)
    if isinstance(strategy, Strategy):
        return strategy
    if strategy == "auto":
        return DDPStrategy if parallel else SingleDeviceStrategy
    entry = StrategyRegistry[strategy.lower()]
    # The class is enough where it is one: to make a strategy may need a package that is not here.
    return entry["strategy"] if isinstance(entry["strategy"], type) else StrategyRegistry.get(strategy.lower())


def _accelerator(accelerator: Any) -> str:
    """Return a type of device, as torch calls it: the one of this machine for ``auto``."""
    if not isinstance(accelerator, str):
        return type(accelerator).__name__.removesuffix("Accelerator").lower()
    if accelerator == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def _num_devices(devices: Any, accelerator: str) -> int:
    if isinstance(devices, str) and "," in devices:
        devices = [index for index in devices.split(",") if index.strip()]
    if isinstance(devices, list | tuple):
        devices = len(devices)
    if devices in ("auto", "-1", -1):
        return max(torch.cuda.device_count(), 1) if accelerator == "cuda" else 1
    if not str(devices).isdecimal() or int(devices) == 0:
        raise ValueError(
            f"trainer.devices={devices!r} is no number of devices. It says how many of each node take part."
            " Use a number, a list of their indices, or 'auto'."
        )
    return int(devices)


def _precision(trainer: Mapping[str, Any], strategy: Strategy | type[Strategy], accelerator: str) -> Precision:
    for plugin in items(trainer.get("plugins")):
        if isinstance(plugin, Precision):
            return plugin
    own = getattr(strategy, "_precision_plugin", None) if isinstance(strategy, Strategy) else None
    name = str(trainer.get("precision") or "32-true")
    name = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(name, name)
    placement = Placement.of(strategy)
    if (name, accelerator) == ("16-mixed", "cpu") and not (placement.ours and placement.shards):  # which refuses it
        name = "bf16-mixed"  # as the Trainer does, with a warning
    return own or _named_precision(name, accelerator)


def _named_precision(name: str, accelerator: str) -> Precision:
    if name in ("16-true", "bf16-true"):
        return HalfPrecision(name)  # type: ignore[arg-type]
    if name in ("16-mixed", "bf16-mixed"):
        # The scaler of a device that is not here warns; the type is what matters.
        return MixedPrecision(name, accelerator if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    if name == "64-true":
        return DoublePrecision()
    plain = Precision()
    if name != "32-true":
        plain.precision = name  # type: ignore[assignment]  (Transformer Engine's, which may not be installed here)
    return plain
