"""Writes a page about the run at its end: curves, time, memory, what took effect."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from mmap import mmap
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.lightning.fit_loop import is_logging_step, leaves_no_files, logged_step
from lightning_ups._compat.optional.packages import has
from lightning_ups.callbacks.acceleration_flags import AccelerationFlags
from lightning_ups.callbacks.logs.run_manifest import RunManifest
from lightning_ups.callbacks.logs.token_throughput import TokenThroughput
from lightning_ups.insight.report import (
    Content,
    History,
    can_draw,
    give_to_loggers,
    logged_images,
    page,
    reserve,
    run_folder,
    write_pictures,
)
from lightning_ups.insight.throughput import Summary, checks, first_change, phase_names, rows
from lightning_ups.order import TrainerOnly
from lightning_ups.transforms.patching import instead_of
from lightning_ups.transforms.quoted import quoted


class TrainingReport(Callback, TrainerOnly):
    """Write one HTML page at the end of fit, which needs no network, and PNGs of its charts.

    The page has the curves of all logged metrics, the last version of each image in TensorBoard or W&B, and the best
    metric and the checkpoints of each ``ModelCheckpoint``. With `TokenThroughput` it also shows the step-time
    breakdown, thresholds that were reached, what to change first, and memory; with `RunManifest`, what took effect.
    Neither needs a setting. A run that fails gets a report, too.

    The page is ``report.html`` next to the logs, or ``report-2.html`` and so on, so that no file is overwritten; the
    pictures are in a folder of the same name. MLflow, W&B and Comet get a copy of both.

    Args:
        pictures: Write PNGs, which needs matplotlib. None: if it is installed.

    Raises:
        ModuleNotFoundError: If pictures are asked for and matplotlib is not installed.

    Example::

        Trainer(callbacks=[TokenThroughput(), RunManifest(), TrainingReport()])
    """

    def __init__(self, *, pictures: bool | None = None) -> None:
        if pictures:
            can_draw()
        self.pictures = has("matplotlib") if pictures is None else pictures
        self._tells = pictures is None and not self.pictures
        self._path = _SharedPath()
        self._history = History()
        self._folder = ""
        self._began = datetime.now()
        self._undo = ExitStack()
        self._open = False
        self._of_another_fit: tuple[Any, Any] = (None, None)

    @property
    def path(self) -> Path | None:
        """The last page, on rank 0 and in the process that forked it; None before it is written."""
        return self._path.get()

    # Hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()
        self._open = stage == "fit" and not leaves_no_files(trainer)
        if not self._open:
            return
        self._folder = run_folder(trainer)  # asks the other ranks: every rank has to
        self._history, self._began = History(), datetime.now()
        if trainer.is_global_zero:
            self._path.set(None)
        self._of_another_fit = _kept(trainer)
        if self._tells:  # only in a run that writes a page
            rank_zero_info("TrainingReport writes no PNGs: pip install matplotlib for them.")
        if trainer.is_global_zero and trainer.loggers:
            self._listen(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With a logger, the history is what it receives. Without one, only steps that a logger would log are read.
        if self._open and not trainer.loggers and trainer.is_global_zero and is_logging_step(trainer):
            self._history.add(_values(trainer.callback_metrics), logged_step(trainer))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._open and not trainer.loggers and trainer.is_global_zero and not trainer.sanity_checking:
            self._history.add(_values(trainer.callback_metrics), trainer.global_step)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._write(trainer, status="finished")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if (throughput := _found(trainer, TokenThroughput)) is not None:
            throughput.on_exception(trainer, pl_module, exception)  # whichever callback comes first in the list
        if (flags := _found(trainer, AccelerationFlags)) is not None:
            flags.end_logs()  # the last rows must be in the history
        self._write(
            trainer,
            status="interrupted" if interrupted else "failed",
            error="" if interrupted else quoted(exception),
        )

    # Content

    def _listen(self, trainer: Trainer) -> None:
        logger: Any = trainer.loggers[0]  # all loggers get the same
        stock: Callable[..., None] = logger.log_metrics

        def log_metrics(metrics: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self._history.add(metrics, trainer.global_step if step is None else step)
            stock(metrics, step=step, **kwargs)

        self._undo.enter_context(instead_of(logger, "log_metrics", log_metrics))

    def _write(self, trainer: Trainer, *, status: str, error: str = "") -> None:
        self._undo.close()
        if not self._open or leaves_no_files(trainer) or not trainer.is_global_zero:
            return
        self._open = False
        content = self._content(trainer, status=status, error=error)
        try:
            if "://" in self._folder:
                raise OSError("it is not a folder of this machine")
            path = _written(page(content), Path(self._folder))
            self._path.set(path)
            if self.pictures:
                write_pictures(path.with_suffix(""), charts=content.charts, split=content.split)
        except OSError as problem:
            rank_zero_warn(
                f"TrainingReport could not write to {self._folder}: {problem}."
                " The run is not affected."
                " Free space, make the folder writable, or give the Trainer another default_root_dir."
            )
            return
        rank_zero_info(f"TrainingReport: {path}")
        give_to_loggers(trainer, path, path.with_suffix(""))

    def _content(self, trainer: Trainer, *, status: str, error: str) -> Content:
        manifest = _found(trainer, RunManifest)
        throughput = _found(trainer, TokenThroughput)
        summary = throughput.summary if throughput is not None else None
        # If a fit fails in setup, other callbacks may still hold values of an earlier run.
        if summary is self._of_another_fit[0]:
            summary = None
        known = manifest.manifest if manifest is not None else {}
        if known is self._of_another_fit[1]:
            known = {}
        module = type(trainer.lightning_module).__name__
        duration = datetime.now() - self._began
        parts = [
            status,
            f"{trainer.global_step} steps",
            f"begun {self._began:%Y-%m-%d %H:%M}",
            f"took {_long(duration)}",
        ]
        if summary is not None:
            parts.append(f"{summary.num_devices} x {summary.device}")
        measured = _measured(summary) if summary is not None and summary.units_per_s is not None else {}
        best, checkpoints = _checkpoints(trainer)
        return Content(
            title=f"{module}: training",
            subtitle=", ".join(parts),
            error=error,
            tiles=[*best, *measured.pop("tiles", ())],
            charts=self._history.charts(),
            checkpoints=checkpoints,
            images=logged_images(trainer),
            left_out=self._history.left_out(),
            no_curves=_no_curves(trainer),
            manifest=_without_run(known),
            **measured,
        )


class _SharedPath:
    """A path in memory that forked processes share: those of ``ddp_notebook`` end with the fit."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory = mmap(-1, 2**14)
        self.set(path)

    def get(self) -> Path | None:
        text = os.fsdecode(self._memory[:].rstrip(b"\0"))
        return Path(text) if text else None

    def set(self, path: Path | None) -> None:
        text = b"" if path is None else os.fsencode(path)
        self._memory[:] = text.ljust(len(self._memory), b"\0")

    def __reduce__(self) -> Any:
        return _SharedPath, (self.get(),)


def _checkpoints(trainer: Trainer) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the best metrics and the paths of what each `ModelCheckpoint` has saved, by name."""
    best: list[tuple[str, str]] = []
    paths: dict[str, str] = {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            name = "newest"
            if callback.monitor is not None and callback.best_model_score is not None:
                name = f"best {callback.monitor}"
                best.append((name, f"{callback.best_model_score:.4g}"))
            for path, what in ((callback.best_model_path, name), (callback.last_model_path, "last")):
                if path:
                    paths.setdefault(path, what)
    return best, [(what, path) for path, what in paths.items()]


def _no_curves(trainer: Trainer) -> str:
    """Return why a run that has no curve of a metric has none."""
    every, steps = trainer.log_every_n_steps, trainer.global_step  # type: ignore[attr-defined]
    if not 0 < every <= steps:
        return (
            f"There is none: the fit ended after {steps} steps, and log_every_n_steps is {every}."
            f" For curves set Trainer(log_every_n_steps={max(1, steps // 10)})."
        )
    return "There is none: the module logged no number, as self.log('loss', loss) does."


def _measured(summary: Summary) -> dict[str, Any]:
    change = first_change(summary)
    figures = rows(summary)
    return {
        "tiles": [*_tiles(summary)],
        "change": None if change is None else (f"{change.name}: {change.what}", f"To do: {change.change}."),
        "checks": [
            (check.name, f"{check.value:.1%}", check.wanted, "pass" if check.passed else "FAIL", check.note)
            for check in checks(summary)
        ],
        "figures": figures,
        "split": {name: summary.split[phase] for phase, name in phase_names(summary).items() if phase in summary.split},
    }


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    assert summary.units_per_s is not None
    assert summary.step_s is not None
    found = [
        (
            f"{summary.unit} per second",
            f"{summary.units_per_s:,.0f}" if summary.units_per_s >= 100 else f"{summary.units_per_s:.3g}",
        ),
        ("median step", f"{summary.step_s * 1e3:.4g} ms"),
    ]
    if "mfu" in summary.utilisation:
        found.append(("MFU", f"{summary.utilisation['mfu']:.1%}"))
    if "reserved" in summary.memory:
        found.append(("peak memory", f"{summary.memory['reserved'] / 2**30:.1f} GiB"))
    if "data" in summary.split:
        found.append(("waiting for data", f"{summary.split['data']:.1%}"))
    return found


def _found(trainer: Trainer, kind: type) -> Any:
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)  # type: ignore[attr-defined]


def _kept(trainer: Trainer) -> tuple[Any, Any]:
    """Return the throughput summary and the manifest that an earlier fit left."""
    throughput, manifest = _found(trainer, TokenThroughput), _found(trainer, RunManifest)
    known = manifest.manifest if manifest is not None else {}
    ended = bool(known) and known["run"]["status"] != "running"
    return (throughput.summary if throughput is not None else None), (known if ended else None)


def _without_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in ("run", "schema")}


def _values(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def _written(text: str, folder: Path) -> Path:
    path = reserve(folder, name="report", ending=".html")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        path.unlink(missing_ok=True)  # no partial pages
        raise
    return path


def _long(duration: Any) -> str:
    seconds = duration.total_seconds()
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
