"""Records what took effect in a run, next to its logs."""

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_ups._compat.environment import (
    gpus,
    graphs_made,
    host,
    relevant_variables,
    versions,
    without_secrets,
    working_tree,
)
from lightning_ups._compat.lightning.fit_loop import leaves_no_files
from lightning_ups._compat.lightning.loggers import log_hyperparameters, logged_hyperparameters
from lightning_ups._compat.lightning.trainer import config_of_cli
from lightning_ups._compat.optional.nvml import gpu_states
from lightning_ups.insight.report import (
    dtype_name,
    flattened,
    give_to_loggers,
    layer_dtypes,
    reserve,
    run_folder,
    write,
)
from lightning_ups.insight.throughput import tensors_of
from lightning_ups.order import (
    OnlyOne,
    Report,
    Run,
    Step,
    applied,
    apply_declared,
    finish_optimizers,
    refuse_second,
)
from lightning_ups.transforms.blocks import find_blocks, own_class
from lightning_ups.transforms.flags import current_flags
from lightning_ups.transforms.quoted import quoted

_SCHEMA = 1


class RunManifest(Callback, OnlyOne):
    """Write down what took effect in a run: versions, device, blocks, graphs, dtypes, mesh, flags, environment.

    Each run (fit, validate, test or predict) gets one JSON file: ``manifest.json``, or ``manifest-2.json`` and so on,
    so that no file is overwritten. It is next to the logs or, with a logger that uses one folder for all runs, next to
    the checkpoints; MLflow, W&B and Comet get a copy. Rank 0 writes it after the first optimizer step, at the end, and
    after an exception. Values are read back from torch and from the trainer, not copied from the settings. What is
    known before the first step is also logged as hyperparameters. ``fast_dev_run``, ``barebones`` and trials of the
    Tuner write no file. Training is not slowed down, and no random number is drawn.

    Args:
        log_hyperparams: Whether the loggers get a flat copy, with names that begin with ``manifest/``.

    Attributes:
        path: The file of the last run, on rank 0; None before it is written.
        manifest: The content of the file.

    Example::

        Trainer(callbacks=[RunManifest()])
    """

    def __init__(self, *, log_hyperparams: bool = True) -> None:
        self.log_hyperparams = log_hyperparams
        self.path: Path | None = None
        self.manifest: dict[str, Any] = {}
        self._folder = ""
        self._report = Report()
        self._started = 0.0
        self._graphs_before: Mapping[str, int] = {}
        self._seen_batch = self._written = False

    @property
    def report(self) -> Report:
        """What the parts of this package report that they did."""
        return self._report

    # Hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_second(Run.of(trainer))
        self._folder = run_folder(trainer)  # asks the other ranks: every rank has to
        self.path, self._report = None, Report()
        self._seen_batch = self._written = False
        self._started, self._graphs_before = time.perf_counter(), graphs_made()
        self.manifest = {
            "schema": _SCHEMA,
            "run": {"kind": stage, "status": "running", "error": None, "started": datetime.now(UTC).isoformat()},
        }
        if trainer.is_global_zero:
            self.manifest |= {
                "versions": versions(),
                "host": host(),
                "code": working_tree(),
                "environment": relevant_variables(),
                "config": _config(trainer),
            }

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Declarations take effect in this hook of the first declaration in the list, which may come after this
        # callback. TensorBoard keeps only the hyperparameters that reach it first, and Lightning logs its own right
        # after this hook.
        if any(isinstance(callback, Step) for callback in trainer.callbacks) and apply_declared(trainer):  # type: ignore[attr-defined]
            finish_optimizers(trainer)
        if trainer.is_global_zero:
            self._look(trainer)
            if self.log_hyperparams and trainer.enable_autolog_hparams:
                self._log(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._before_batch(trainer, batch)
        # Not at the end of the batch: callbacks later in the list have not reported yet.
        if trainer.global_step > 0 and not self._written and trainer.is_global_zero:
            self._written = True
            self._write(trainer)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._before_batch(trainer, batch)

    @override
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._before_batch(trainer, batch)

    @override
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._before_batch(trainer, batch)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer, status="finished")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        self._finish(
            trainer,
            status="interrupted" if interrupted else "failed",
            error=quoted(exception),
        )

    def _before_batch(self, trainer: Trainer, batch: Any) -> None:
        if self._seen_batch or trainer.sanity_checking or not trainer.is_global_zero:
            return
        self._seen_batch = True
        self._look(trainer)
        self.manifest["batch"] = _read("batch", lambda: _shape_of(batch))

    def _finish(self, trainer: Trainer, *, status: str, error: str | None = None) -> None:
        if not self.manifest or not trainer.is_global_zero:
            return  # failed before it was set up
        self.manifest["run"] |= {"status": status, "error": error}
        if "model" not in self.manifest and error is None:  # an error here must not hide the first one
            self._look(trainer)
        self._write(trainer)
        if self.path is not None:
            give_to_loggers(trainer, self.path)

    # Content

    def _look(self, trainer: Trainer) -> None:
        context = applied(trainer.strategy)
        if context is not None:
            self._report = context.report
        parts: dict[str, Callable[[], Any]] = {
            "device": lambda: _device(trainer),
            "model": lambda: _model(trainer.lightning_module),
            "precision": lambda: _precision(trainer),
            "strategy": lambda: _strategy(trainer),
            "optimizers": lambda: [_optimizer(optimizer) for optimizer in trainer.optimizers],
            "schedulers": lambda: [_name(config.scheduler) for config in trainer.lr_scheduler_configs],
            "training": lambda: _training(trainer),
            "flags": current_flags,
        }
        self.manifest |= {name: _read(name, part) for name, part in parts.items()}

    def _write(self, trainer: Trainer) -> None:
        made = graphs_made()
        self.manifest["compiled"] = {name: made[name] - self._graphs_before.get(name, 0) for name in made}
        self.manifest["report"] = self._report.parts
        self.manifest["run"] |= {
            "duration_s": round(time.perf_counter() - self._started, 3),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
        }
        if leaves_no_files(trainer):
            return  # a trial run writes no files; its folder would be the current directory
        try:
            if "://" in self._folder:
                raise OSError("it is not a folder of this machine")
            self.path = self.path or reserve(Path(self._folder))
            write(self.manifest, self.path)
        except OSError as error:
            if self.path is not None and self.path.exists() and not self.path.stat().st_size:
                self.path.unlink()  # the name was free, and the content did not fit
                self.path = None
            rank_zero_warn(
                f"RunManifest could not write to {self._folder}: {error}."
                " The run continues, and RunManifest.manifest still has the content."
                " Free space, make the folder writable, or give the Trainer another default_root_dir."
            )

    def _log(self, trainer: Trainer) -> None:
        flat = _hyperparameters(self.manifest, self._report)
        for logger in trainer.loggers:
            # Together with the module's own, which Lightning logs next: TensorBoard would drop those.
            own = logged_hyperparameters(trainer) if isinstance(logger, TensorBoardLogger) else {}
            log_hyperparameters(logger, {**own, **flat})


def _read(name: str, part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # noqa: BLE001  (of a class that nobody has thought of: what only looks ends no run)
        rank_zero_warn(
            f"RunManifest could not read the {name}: {quoted(error)}. The run continues, and the manifest lacks that"
            " part. Please report this, or leave RunManifest out."
        )
        return {"not_read": quoted(error)}


def _device(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return {"type": device.type}
    used = {each.index for each in getattr(trainer.strategy, "parallel_devices", None) or [device]}
    states = {state["index"]: state for state in gpu_states() or []}
    return {
        "type": "cuda",
        "index": device.index,
        "gpus": [gpu | states.get(gpu["index"], {}) for gpu in gpus() if gpu["index"] in used],
    }


def _model(module: LightningModule) -> dict[str, Any]:
    counts = {"trainable": 0, "frozen": 0}
    for parameter in module.parameters():
        if isinstance(parameter, UninitializedParameter):  # of a lazy module, before its first batch
            counts["not_made_yet"] = counts.get("not_made_yet", 0) + 1
            continue
        counts["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    blocks = find_blocks(module)
    return {
        "class": _name(module),
        "parameters": counts,
        "blocks": {
            "count": len(blocks),
            "origin": blocks.origin,
            "classes": sorted({own_class(block).__name__ for block in blocks.values()}),
        },
    }


def _precision(trainer: Trainer) -> dict[str, Any]:
    plugin = trainer.precision_plugin
    # FSDP1 and its subclasses cast by a configuration of the whole model.
    cast = getattr(getattr(plugin, "mixed_precision_config", None), "param_dtype", None)
    return {
        "plugin": _name(plugin),
        "name": plugin.precision,
        "layers": layer_dtypes(
            trainer.lightning_module,
            device=trainer.strategy.root_device,
            context=plugin.forward_context,
            cast=cast,
        ),
    }


def _strategy(trainer: Trainer) -> dict[str, Any]:
    context = applied(trainer.strategy)
    mesh = context.mesh if context is not None else None
    if mesh is None and isinstance(trainer.strategy, ModelParallelStrategy):
        mesh = trainer.strategy.device_mesh
    names = getattr(mesh, "mesh_dim_names", None)
    return {
        "class": _name(trainer.strategy),
        "world_size": trainer.world_size,
        "nodes": trainer.num_nodes,
        "devices": trainer.num_devices,
        "mesh": None if mesh is None else dict(zip(names or range(mesh.ndim), mesh.shape, strict=True)),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    # Values of the groups: `defaults` apply only to groups without a value. Learning rates before any schedule.
    groups = [
        {**group, **({"lr": group["initial_lr"]} if "initial_lr" in group else {})} for group in optimizer.param_groups
    ]
    settings = {}
    for name in dict.fromkeys(name for group in groups for name in group if name not in ("params", "initial_lr")):
        values = [_plain(group.get(name)) for group in groups]
        if all(isinstance(value, (bool, int, float, str, tuple, list)) or value is None for value in values):
            settings[name] = values[0] if all(value == values[0] for value in values) else values
    stepped = getattr(optimizer, "inner", optimizer)
    found = {"class": _name(stepped), "groups": len(groups), "settings": settings}
    return found if stepped is optimizer else found | {"by": _name(optimizer)}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # such as a rate under Compile


def _training(trainer: Trainer) -> dict[str, Any]:
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED", "")).isdecimal() else None,
        "torch_seed": torch.initial_seed(),
    }


def _config(trainer: Trainer) -> Any:
    """Return the configuration of LightningCLI, or None."""
    if (of_cli := config_of_cli(trainer)) is None:
        return None
    return without_secrets(yaml.safe_load(of_cli.parser.dump(of_cli.config, skip_none=False)))


def _shape_of(batch: Any) -> dict[str, Any]:
    tensors = tensors_of(batch)
    shapes = {name: f"{dtype_name(tensor.dtype)} [{_sizes(tensor)}]" for name, tensor in [*tensors.items()][:16]}
    sized = [tensor.size(0) for tensor in tensors.values() if tensor.dim()]
    return {"size": sized[0] if sized else None, "tensors": shapes}


def _sizes(tensor: Tensor) -> str:
    ragged = tensor.is_nested and tensor.layout == torch.strided  # has no shape
    return ", ".join(map(str, [tensor.size(0), *["*"] * (tensor.dim() - 1)] if ragged else tensor.shape))


_FORBIDDEN, _LONGEST_NAME = re.compile(r"[^0-9A-Za-z_\-. :/]"), 250  # in names, required by MLflow
_TO_LOGGERS = ("versions", "device", "model", "precision", "strategy", "optimizers", "training", "flags")


def _hyperparameters(manifest: Mapping[str, Any], report: Report) -> dict[str, Any]:
    flat = flattened({name: manifest[name] for name in _TO_LOGGERS}, prefix="manifest")
    for part, facts in report.parts.items():
        flat |= {f"manifest/{part}/{name}": fact for name, fact in facts.items() if not isinstance(fact, Mapping)}
    flat = {name: value for name, value in flat.items() if not name.endswith("/lines")}
    return {
        _FORBIDDEN.sub("", name)[:_LONGEST_NAME]: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in flat.items()
    }


def _name(thing: Any) -> str:
    kind = own_class(thing) if isinstance(thing, nn.Module) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
