"""Describe the run that a configuration requests, without a Trainer: it may be for another machine."""

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
from lightning_ups.config.suggestions import suggest
from lightning_ups.order import Placement, Run, refuse_precision
from lightning_ups.transforms.quoted import first_line

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True, kw_only=True)
class RequestedRun:
    """A parsed configuration and the run that it describes."""

    run: Run  # its module may be on the meta device
    optimizer: str | None  # the class of the section ``optimizer``
    config: Mapping[str, Any]  # all settings, with presets and defaults, as in YAML
    slots: Mapping[str, str]  # the sections of callbacks that have one, by class name
    preset: str | None = None
    notes: Sequence[str] = ()  # what could not be determined on this machine
    data: Callable[[], Any] | None = None  # creates the datamodule
    make_optimizer: Callable[[Any], Any] | None = None  # that of the section ``optimizer``, for a module

    def label(self, part: object) -> str | None:
        """Return the class of `part` with the settings that are not its defaults; None for an unchanged section."""
        name = type(part).__name__
        section = self.slots.get(name)
        settings = self.config.get(section, {}) if section else self._init_args(part)
        parameters = inspect.signature(type(part)).parameters
        changed = {k: value for k, value in settings.items() if k in parameters and value != parameters[k].default}
        if section and not changed:
            return None
        return f"{name}({', '.join(f'{key}={value}' for key, value in changed.items())})"

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


def build_on_meta(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `make` returns on the meta device, or on the CPU if it needs values, and a note about that."""
    try:
        with torch.device("meta"):
            return make(), []
    except Exception as error:
        root = unwrapped(error)
        if not isinstance(root, (NotImplementedError, RuntimeError)) or "meta" not in str(root):
            raise
    return make(), ["The module was built on the CPU, because its constructor reads values of tensors."]


def call_configure_model(module: LightningModule) -> list[str]:
    """Call ``configure_model``, which may create the layers; return a note if that needs a Trainer."""
    if not is_overridden("configure_model", module):
        return []
    try:
        with torch.device("meta"):
            module.configure_model()
    except (NotImplementedError, RuntimeError) as error:
        return [f"configure_model cannot run here, so the layers that it creates are unknown: {first_line(error)}"]
    return []


def instantiate(spec: Any) -> Any:
    """Return `spec`, as YAML has it, with an object for each ``class_path``, the inner ones first."""
    if isinstance(spec, list):
        return [instantiate(each) for each in spec]
    if not isinstance(spec, dict):
        return spec
    inner = {key: instantiate(value) for key, value in spec.items()}
    return instantiate_class((), inner) if "class_path" in inner else inner


def run_of(module: LightningModule, trainer: Mapping[str, Any], callbacks: Sequence[Callback]) -> Run:
    """Return the run of `module` with the arguments of a Trainer, which is not created.

    Raises:
        ValueError: If an argument is wrong.
    """
    check_trainer(trainer, here=False)
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
        loggers=tuple(items(trainer.get("logger"))),
        detects_anomalies=bool(trainer.get("detect_anomaly")),
    )


def check_trainer(trainer: Mapping[str, Any], *, here: bool, module: LightningModule | None = None) -> None:
    """Refuse arguments of the Trainer that cannot work.

    Args:
        trainer: The arguments.
        here: Whether the run is for this machine.
        module: The model. A Trainer on a CPU would replace its precision in silence, so this is checked first.

    Raises:
        ValueError: If two precisions are given, a count is below 1, or strategy, accelerator or precision is wrong.
        RuntimeError: If there is no GPU.
    """
    _check_one_precision(trainer)
    for name in ("accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"):
        value = trainer.get(name)
        if type(value) is int and value < 1:  # the Trainer would divide by it
            never = "" if name == "accumulate_grad_batches" else " To skip validation, set limit_val_batches to 0."
            raise ValueError(f"trainer.{name} is {value}. It must be at least 1.{never}")
    _check_known("strategy", trainer["strategy"], ["auto", *StrategyRegistry.available_strategies()])
    _check_known("accelerator", trainer["accelerator"], ["auto", "gpu", *AcceleratorRegistry.available_accelerators()])
    if here and (missing := missing_gpu(trainer["accelerator"])):
        raise RuntimeError(f"{missing} Use --trainer.accelerator auto, or see `doctor`; `explain` needs no GPU.")
    if module is not None:
        refuse_precision(run_of(module, trainer, ()))


def missing_gpu(accelerator: Any) -> str | None:
    """Return why a run on `accelerator` cannot start on this machine."""
    if accelerator not in ("gpu", "cuda") or torch.cuda.is_available() or torch.backends.mps.is_available():
        return None
    built = torch.version.cuda or torch.version.hip
    why = "The driver or CUDA_VISIBLE_DEVICES hides it" if built else "This torch is built for CPUs only"
    return f"trainer.accelerator is {accelerator!r}, but torch finds no GPU. {why}."


def _check_one_precision(trainer: Mapping[str, Any]) -> None:
    given = [type(plugin).__name__ for plugin in items(trainer.get("plugins")) if isinstance(plugin, Precision)]
    if trainer.get("precision") is not None:
        given.insert(0, f"trainer.precision={trainer['precision']}")
    if len(given) > 1:
        raise ValueError(f"Two precisions are given: {' and '.join(given)}. A Trainer takes one. Keep one of them.")


def _check_known(what: str, given: Any, known: Sequence[str]) -> None:
    if isinstance(given, str) and given.lower() not in known:
        raise ValueError(f"trainer.{what} is {given!r}, which is unknown. {suggest(given, known, most=40)}")


def _strategy(strategy: Strategy | str, *, parallel: bool) -> Strategy | type[Strategy]:
    if isinstance(strategy, Strategy):
        return strategy
    if strategy == "auto":
        return DDPStrategy if parallel else SingleDeviceStrategy
    entry = StrategyRegistry[strategy.lower()]
    # To instantiate the class may need a package that is not installed here.
    return entry["strategy"] if isinstance(entry["strategy"], type) else StrategyRegistry.get(strategy.lower())


def _accelerator(accelerator: Any) -> str:
    """Return the type of device, as torch calls it; for ``auto``, the one of this machine."""
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
            f"trainer.devices is {devices!r}. Use a number of devices, a list of their indices, or 'auto'."
        )
    return int(devices)


def _precision(trainer: Mapping[str, Any], strategy: Strategy | type[Strategy], accelerator: str) -> Precision:
    for plugin in items(trainer.get("plugins")):
        if isinstance(plugin, Precision):
            return plugin
    own = getattr(strategy, "_precision_plugin", None) if isinstance(strategy, Strategy) else None
    name = str(trainer.get("precision") or "32-true")
    name = _PRECISIONS.get(name, name)
    placement = Placement.of(strategy)
    if (name, accelerator) == ("16-mixed", "cpu") and not (placement.ours and placement.shards):  # those refuse it
        name = "bf16-mixed"  # as the Trainer does, with a warning
    return own or _named_precision(name, accelerator)


def _named_precision(name: str, accelerator: str) -> Precision:
    if name in ("16-true", "bf16-true"):
        return HalfPrecision(name)  # type: ignore[arg-type]
    if name in ("16-mixed", "bf16-mixed"):
        # The gradient scaler warns about a missing device; only the dtype is needed.
        return MixedPrecision(name, accelerator if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    if name == "64-true":
        return DoublePrecision()
    plain = Precision()
    if name != "32-true":
        plain.precision = name  # type: ignore[assignment]  (Transformer Engine's, which may not be installed here)
    return plain
