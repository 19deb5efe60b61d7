"""How fast training is, what its time goes into, and what to change first."""

import inspect
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups._compat.fit_loop import is_logging_step, logged_step
from lightning_ups._compat.kernels_seen import Kernels, is_profiled, watched_waits
from lightning_ups._compat.nvml import Sampler, sensor
from lightning_ups.callbacks.listening import Listener
from lightning_ups.order import PolicyPrecision, applied
from lightning_ups.transforms.resume.random_state import host_state, restore_host_state
from lightning_ups.transforms.throughput import (
    Arithmetic,
    Count,
    Flops,
    Inspection,
    Meter,
    Peaks,
    Phase,
    Span,
    Summary,
    Timeline,
    clock_for,
    counter,
    first_change,
    look,
    own_peaks,
    peaks_of,
    quantile,
    step_flops,
)
from lightning_ups.transforms.throughput.table import rendered

__all__ = ["TokenThroughput"]

_SPLIT_EVERY = 11  # on a GPU, where a mark costs the host some microseconds; a prime, see Timeline
_WATCHED, _LOOKED_AT = 1, 2  # steps of an inspection: for waits, and then kernel by kernel


class TokenThroughput(Callback):
    """Measure tokens (or samples, or what you count) per second, the split of a step, utilisation, memory and power.

    Figures go to every logger at the Trainer's ``log_every_n_steps``, to the progress bar, and into a table at the end,
    which holds them against thresholds and names the one thing to change first. They are times of the device: marks are
    read some steps late, nothing waits in a step, and training is the same bit for bit.

    Once, after ``inspect_at`` steps, three steps are looked at closely: one for places at which the host waits for the
    GPU, two kernel by kernel for idle time and communication that nothing hides. They do not count.

    Args:
        unit: ``"tokens"``, ``"samples"``, or a name of yours together with ``count``; ``"auto"``: tokens where the batch has
            integers [batch, position], and samples elsewhere.
        count: What counts a batch: a function of it, or the dotted name of a tensor in it whose elements are counted.
        warmup_steps: Steps at the beginning that do not count: they compile, allocate and fill caches.
        inspect_at: After how many steps to look closely; None: never. On a CPU there is nothing to look at.
        split_every: Of how many steps one is split into phases. None: every step on a CPU, every eleventh on a GPU.
        flops_per_unit: Floating-point operations of forward and backward for one unit. None: counted on the first batch,
            on tensors without data.
        peak_tflops: What one device can do, in TFLOP/s, where it is not known: a figure, or one for each of ``"bf16"``,
            ``"fp8"``, ``"tf32"``, ``"fp32"``.
        single_device: Units per second of one device alone, for the efficiency of scaling.
        progress_bar: Show the rate, the utilisation and the wait for data there.
        table: Print the table at the end of fit.

    Attributes:
        summary: The figures of the last fit, after it; None before.

    Raises:
        ValueError: If a number is out of range, or if a batch has nothing that is to be counted.

    Example::

        Trainer(callbacks=[TokenThroughput(unit="samples", inspect_at=None)])
    """

    def __init__(
        self,
        *,
        unit: str = "auto",
        count: str | Callable[[Any], Any] | None = None,
        warmup_steps: int = 10,
        inspect_at: int | None = 20,
        split_every: int | None = None,
        flops_per_unit: float | None = None,
        peak_tflops: float | Mapping[str, float] | None = None,
        single_device: float | None = None,
        progress_bar: bool = True,
        table: bool = True,
    ) -> None:
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("inspect_at", inspect_at, 1),
            ("split_every", split_every, 1),
        ):
            if value is not None and value < least:
                raise ValueError(
                    f"TokenThroughput({name}={value}) is out of range."
                    f" It counts steps, and the smallest that means something is {least}."
                    f" Use {least} or more."
                )
        if count is None and unit not in ("auto", "tokens", "samples"):
            raise ValueError(
                f"TokenThroughput(unit={unit!r}) does not say how to count."
                " Tokens and samples are found in the batch; any other unit is yours."
                " Give count as well: a function of the batch, or the name of a tensor in it."
            )
        own_peaks(1.0 if peak_tflops is None else peak_tflops, arithmetic="bf16")  # so that a mistake is refused here
        self.unit, self.count = unit, count
        self.warmup_steps, self.inspect_at, self.split_every = warmup_steps, inspect_at, split_every
        self.flops_per_unit, self.peak_tflops, self.single_device = flops_per_unit, peak_tflops, single_device
        self.progress_bar, self.table = progress_bar, table
        self.summary: Summary | None = None
        self._undo = ExitStack()
        self._run: _Run | None = None

    # When

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_began = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        self.summary = None
        if not trainer.fast_dev_run and not trainer.barebones:  # type: ignore[attr-defined]
            self.open(trainer)

    def open(self, trainer: Trainer) -> None:
        """Begin to measure; fit does it when training starts."""
        run = self._run = _Run(self, trainer, began=getattr(self, "_fit_began", time.perf_counter()))
        listener = Listener.install(trainer, enter=run.enter, leave=run.leave)
        self._undo.callback(listener.remove, trainer)
        self._undo.callback(run.close)
        bar = trainer.progress_bar_callback
        if self.progress_bar and bar is not None:
            stock = bar.get_metrics
            bar.get_metrics = lambda *args, **kwargs: {**stock(*args, **kwargs), **run.shown}  # type: ignore[method-assign]
            self._undo.callback(vars(bar).pop, "get_metrics", None)

    def close(self) -> None:
        """Leave the Trainer as it was; fit does it when it ends."""
        self._undo.close()
        self._run = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.begin_batch(batch)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._run is not None and not pl_module.automatic_optimization:
            self._run.enter("backward")  # which Lightning's profiler does not hear of there

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None and not pl_module.automatic_optimization:
            self._run.leave()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.end_batch()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end_validation()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end_epoch()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is None:
            return
        self.summary = self._run.summary()
        if (context := applied(trainer.strategy)) is not None:
            context.report.update("TokenThroughput", **facts(self.summary))
        if self.table and trainer.is_global_zero:
            sys.stdout.write(rendered(self.summary))
            sys.stdout.flush()
        self.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()


def facts(summary: Summary) -> dict[str, Any]:
    """Return what a manifest keeps of ``summary``, as plain values."""
    change = first_change(summary)
    return {
        "unit": summary.unit,
        "units_per_s": summary.units_per_s,
        "units_per_s_per_device": summary.units_per_s_per_device,
        "step_s": summary.step_s,
        "step_p95_s": summary.step_p95_s,
        "split": dict(summary.split),
        "utilisation": dict(summary.utilisation),
        "memory": dict(summary.memory),
        "gpu": dict(summary.gpu),
        "change_first": None if change is None else f"{change.name}: {change.what}",
    }


class _Run:
    """One fit, from the start of training to its end."""

    def __init__(self, settings: TokenThroughput, trainer: Trainer, *, began: float) -> None:
        self._settings, self._trainer, self._began = settings, trainer, began
        self._device = trainer.strategy.root_device
        on_gpu = self._device.type == "cuda"
        self._timeline = Timeline(
            clock_for(self._device), split_every=settings.split_every or (_SPLIT_EVERY if on_gpu else 1)
        )
        data = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": trainer.world_size}
        replicas = data["num_replicas"]
        self._meter = Meter(warmup_steps=settings.warmup_steps, share=replicas / trainer.world_size, replicas=replicas)
        self._count: Count | None = None
        self._unit = settings.unit
        self._flops: Flops | None = None
        self._why_no_mfu = ""
        self._units: Any = 0.0  # of the step that runs
        self._steps = 0  # optimizer steps done
        self._global_step = trainer.global_step
        self._stepped = True
        self._training_began: float | None = None
        self._validating = self._skip = False
        self._inspection: Inspection | None = None
        self._look: _Look | None = None
        self._sampler: Sampler | None = None
        if on_gpu and (read := sensor(self._device)) is not None:
            self._sampler = Sampler(read)
            self._sampler.start()
        self._names = f"throughput/{self._unit}"
        self.shown: dict[str, Any] = {}

    # The Trainer's loop

    def enter(self, phase: Phase) -> None:
        if phase == "data":
            if self._validating:
                self.end_validation()  # it had no batches, and so no end
            if self._stepped:
                self._next_step()
        elif phase == "validation":
            if self._validating:
                return
            self._validating = True
        elif self._validating and phase != "checkpoint":
            phase = "validation"  # moving its batches is no part of a step
        self._timeline.enter(phase)

    def leave(self) -> None:
        self._timeline.leave()

    def end_validation(self) -> None:
        if self._validating:
            self._validating = False
            self._timeline.leave()

    def _next_step(self) -> None:
        self._timeline.step(self._note())
        self._stepped = False
        if self._look is not None:
            self._look, self._skip = self._look.next(), True  # starting and stopping to look takes time of this step
        for step in self._timeline.read():
            self._meter.add(step)
        if self._sampler is not None and self._steps == self._settings.warmup_steps:
            self._sampler.forget()
        if self._looks_now():
            self._look = _Look(self._inspected)

    def _looks_now(self) -> bool:
        due = self._inspection is None and self._look is None and self._steps == self._settings.inspect_at
        return due and self._device.type == "cuda" and not is_profiled()

    def _note(self) -> Any:
        """Return how many units the step that ends now worked on, or None if it is not to count."""
        units, self._units = self._units, 0.0
        skip, self._skip = self._skip or self._look is not None, False
        if skip:
            return None
        # A count that lies on the device is on the host when the device has passed the end of the step.
        return units.to("cpu", non_blocking=True) if isinstance(units, Tensor) else units

    def _inspected(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def begin_batch(self, batch: Any) -> None:
        if self._count is None:
            self._first_batch(batch)
        assert self._count is not None
        self._units = self._units + self._count(batch)

    def end_batch(self) -> None:
        if (step := self._trainer.global_step) == self._global_step:
            return  # gradients accumulate
        self._global_step, self._stepped = step, True
        self._steps += 1
        if self._steps == 1:
            self._training_began = time.perf_counter()
        if is_logging_step(self._trainer):
            self._log()

    def end_epoch(self) -> None:
        # What lies between two epochs is no part of a step.
        self._timeline.end(self._note())
        self._stepped = True

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        if self._sampler is not None:
            self._sampler.stop()

    # The first batch

    def _first_batch(self, batch: Any) -> None:
        settings = self._settings
        self._unit, self._count = counter(settings.unit, settings.count, batch)
        if settings.unit == "auto":
            rank_zero_info(f"TokenThroughput counts {self._unit}: unit='auto' found them in the first batch.")
        self._names = f"throughput/{self._unit}"
        peaks, arithmetic = self._peaks()
        if peaks is None:
            return
        if settings.flops_per_unit is not None:
            model = hardware = settings.flops_per_unit * self._meter.share
            low = 0.0
        else:
            found = self._counted(batch)
            units = float(self._count(batch))
            if found is None or not units:
                return
            model, hardware, low = (n / units for n in (found.model, found.hardware, found.low_precision))
        self._flops = Flops(
            model=model,
            hardware=hardware,
            low_precision=low,
            peak=peaks.of(arithmetic),
            low_precision_peak=peaks.of("fp8"),
        )

    def _counted(self, batch: Any) -> Any:
        module = self._trainer.lightning_module
        state = host_state()
        try:
            return step_flops(module, batch, step=_training_step, attributes=_stand_ins(module))
        except Exception as error:  # noqa: BLE001  (a user's step on tensors without data may raise anything)
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self._why_no_mfu = "FLOPs could not be counted; give flops_per_unit"
            rank_zero_info(
                f"TokenThroughput could not count the FLOPs of {type(module).__name__}: {why[:300]}."
                " The step was tried on tensors without data, and it needs values."
                " For MFU give flops_per_unit, such as 6 x parameters for each token."
            )
            return None
        finally:
            restore_host_state(state)

    def _peaks(self) -> tuple[Peaks | None, Arithmetic]:
        arithmetic = _arithmetic(self._trainer)
        if self._settings.peak_tflops is not None:
            return own_peaks(self._settings.peak_tflops, arithmetic=arithmetic), arithmetic
        name = _device_name(self._device)
        peaks = peaks_of(name) if self._device.type == "cuda" else None
        if peaks is None:
            self._why_no_mfu = f"the peak of {name!r} is not known; give peak_tflops"
        return peaks, arithmetic

    # Figures

    def _log(self) -> None:
        window = self._meter.window()
        if not window:
            return
        figures = {
            f"{self._names}_per_s": window.pop("units_per_s"),
            f"{self._names}_per_s_per_device": (rate := window.pop("units_per_s_per_device")),
        }
        figures |= {f"throughput/{name}": value for name, value in window.items()}
        utilisation = self._flops.utilisation(rate) if self._flops is not None else {}
        figures |= {f"throughput/{name}": value for name, value in utilisation.items()}
        if self._device.type == "cuda":
            memory = _memory(self._device)
            figures |= {
                "memory/allocated_gib": memory["allocated"] / 2**30,
                "memory/reserved_gib": memory["reserved"] / 2**30,
                "memory/allocation_retries": memory["retries"],
            }
        if self._sampler is not None:
            figures |= _numbers(self._sampler.latest)
        self._show(rate, utilisation, window)
        if self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(figures, step=logged_step(self._trainer))

    def _show(self, rate: float, utilisation: Mapping[str, float], window: Mapping[str, float]) -> None:
        short = {"tokens": "tok", "samples": "samples"}.get(self._unit, self._unit)
        self.shown = {f"{short}/s": _short(rate * self._trainer.world_size)}
        if "mfu" in utilisation:
            self.shown["MFU"] = f"{utilisation['mfu']:.0%}"
        if (data := window.get("data_ms", 0.0)) >= 0.05 * window["step_ms"]:
            self.shown["data"] = f"{data / window['step_ms']:.0%}"

    def summary(self) -> Summary:
        """Return the figures of the whole fit; every rank takes part."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._timeline.end(self._note())
        for step in self._timeline.finish():
            self._meter.add(step)
        meter, trainer = self._meter, self._trainer
        ranks = _gathered(meter.own())
        now = time.perf_counter()
        found: dict[str, Any] = {}
        if meter.seconds:
            seconds = meter.total_s
            rate = meter.per_device(meter.units, seconds)
            whole = sum(rank.units / rank.seconds * meter.share for rank in ranks if rank.seconds)
            found = {
                "units_per_s": whole,
                "units_per_s_per_device": whole / trainer.world_size,
                "units_per_step": meter.units / len(meter.seconds) * meter.replicas,
                "step_s": statistics.median(meter.seconds),
                "step_p95_s": quantile(meter.seconds, 0.95),
                "utilisation": self._flops.utilisation(rate) if self._flops is not None else {},
            }
        return Summary(
            unit=self._unit,
            device=_device_name(self._device),
            num_devices=trainer.world_size,
            steps=len(meter.seconds),
            warmup_steps=meter.warmup_steps,
            split=meter.shares(),
            split_steps=meter.split_steps,
            pauses=dict(meter.pauses),
            start_s=None if self._training_began is None else self._training_began - self._began,
            fit_s=now - self._began,
            inspection=self._inspection,
            flops=self._flops,
            why_no_mfu=self._why_no_mfu or "no step was measured",
            memory=_memory(self._device) if self._device.type == "cuda" else {},
            gpu=self._sampler.summary() if self._sampler is not None else {},
            single_device=self._settings.single_device,
            ranks=ranks,
            hints=_hints(trainer),
            **found,
        )


class _Look:
    """Three steps that are looked at: one for waits, two kernel by kernel. Each call of `next` is a step's end."""

    def __init__(self, done: Callable[[Inspection], None]) -> None:
        self._done, self._left = done, _WATCHED + _LOOKED_AT
        self._waits: Counter[str] = Counter()
        self._watch = ExitStack()
        self._kernels: Kernels | None = None
        self._watch.enter_context(watched_waits(self._waits))

    def next(self) -> "_Look | None":
        """Go on with the next step; None when it is over."""
        self._left -= 1
        if self._left == _LOOKED_AT:
            self._watch.close()
            self._kernels = Kernels()
            self._kernels.start()
        if self._left > 0:
            return self
        spans = [Span(*kernel) for kernel in self.cancel()]
        waits = [(place, count // _WATCHED) for place, count in self._waits.most_common()]
        self._done(look(spans, steps=_LOOKED_AT, waits=waits))
        return None

    def cancel(self) -> list[tuple[str, float, float]]:
        """Stop looking."""
        self._watch.close()
        kernels, self._kernels = self._kernels, None
        return [] if kernels is None else kernels.stop()


def _training_step(module: Any, batch: Any) -> Any:
    needed = [p for p in inspect.signature(module.training_step).parameters.values() if p.kind != p.KEYWORD_ONLY]
    return module.training_step(batch, 0) if len(needed) > 1 else module.training_step(batch)


def _stand_ins(module: LightningModule) -> dict[str, Any]:
    """Return what keeps a twin's step from acting on the run."""

    def nothing(*_: Any, **__: Any) -> None: ...

    optimizers = [_NoOptimizer() for _ in module.trainer.optimizers]
    one_or_all = optimizers[0] if len(optimizers) == 1 else optimizers
    return {
        **dict.fromkeys(
            ("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"), nothing
        ),
        "manual_backward": _backward,
        "optimizers": lambda *_, **__: one_or_all,
        "lr_schedulers": lambda *_, **__: _NoOptimizer(),
        "all_gather": lambda data, *_, **__: data,
        "_device": torch.device("meta"),
    }


def _backward(loss: Tensor, *_: Any, **__: Any) -> None:
    torch.autograd.backward(loss.sum())


class _NoOptimizer:
    """Has every method of an optimizer and of a scheduler, and does nothing."""

    param_groups: tuple[dict[str, float], ...] = ({"lr": 0.0},)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._run

    @staticmethod
    def _run(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return closure() if callable(closure) else None


def _arithmetic(trainer: Trainer) -> Arithmetic:
    precision = trainer.precision_plugin
    if isinstance(precision, PolicyPrecision):
        half = precision.policy.param in (torch.bfloat16, torch.float16)
    else:
        half = str(precision.precision).startswith(("bf16", "16", "transformer-engine"))
    if half:
        return "bf16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _memory(device: torch.device) -> dict[str, float]:
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.peak", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "total": torch.cuda.get_device_properties(device).total_memory,
    }


def _numbers(reading: Mapping[str, Any]) -> dict[str, float]:
    numbers = {f"gpu/{name}": value for name, value in reading.items() if isinstance(value, (int, float))}
    return numbers | ({"gpu/slowed": float(bool(reading["slowed_by"]))} if "slowed_by" in reading else {})


def _gathered(own: Any) -> list[Any]:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def _hints(trainer: Trainer) -> dict[str, Any]:
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        return {}
    return {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory, "batch_size": loader.batch_size}


def _short(rate: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if rate >= size:
            return f"{rate / size:.3g}{letter}"
    return f"{rate:.3g}"
