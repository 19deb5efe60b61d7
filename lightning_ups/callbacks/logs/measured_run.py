"""The measurements of TokenThroughput in one fit."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_ups._compat.lightning.fit_loop import fetches_in_step, is_logging_step, logged_step
from lightning_ups._compat.optional.nvml import Sampler, sensor
from lightning_ups._compat.torch.flags import read_tf32
from lightning_ups.callbacks.acceleration_flags import AccelerationFlags
from lightning_ups.callbacks.logs.listening import CloseLook, ProfilerListener, can_look_at
from lightning_ups.insight.dry_run import NotCopiedError
from lightning_ups.insight.throughput import (
    Arithmetic,
    Count,
    Flops,
    Inspection,
    Meter,
    Peaks,
    Phase,
    StepFlops,
    Summary,
    Timeline,
    clock_for,
    counter,
    given_peaks,
    peaks_of,
    quantile,
    step_flops,
)
from lightning_ups.order import PolicyPrecision
from lightning_ups.transforms.quoted import quoted

if TYPE_CHECKING:
    from lightning_ups.callbacks.logs.token_throughput import TokenThroughput

_SPLIT_EVERY = 11  # on a GPU, where a mark costs the host some microseconds; a prime, see Timeline
_TRIES = 5  # of profiling, which validation, a checkpoint or the end of an epoch interrupts


class MeasuredRun:
    """Measures one fit, from the start of training to its end.

    Args:
        settings: The callback, with its arguments as attributes.
        trainer: The Trainer.
        began: When the fit began, by ``time.perf_counter``.
    """

    def __init__(self, settings: "TokenThroughput", trainer: Trainer, *, began: float) -> None:
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
        self._counts_at_end = False  # the step takes its batches itself
        self._unit = settings.unit
        self._flops: Flops | None = None
        self._why_no_mfu = ""
        self._units: Any = 0.0  # of the step that runs
        self._batch_units: Any = None  # of the batch that runs
        self._trains = False  # of the step that runs, a batch
        self._steps = 0  # optimizer steps done
        self._is_manual = not trainer.lightning_module.automatic_optimization  # each batch is a step then
        self._global_step, self._first_step = trainer.global_step, logged_step(trainer)
        self._stepped = True
        self._training_began: float | None = None
        self._validating = self._skip = False
        self._inspection: Inspection | None = None
        self._look: CloseLook | None = None
        self._look_at, self._tries = settings.inspect_at, 0
        self._sampler: Sampler | None = None
        if on_gpu and (read := sensor(self._device)) is not None:
            self._sampler = Sampler(read)
            self._sampler.start()
        self._names = f"throughput/{self._unit}"
        self.shown: dict[str, Any] = {}

    # The Trainer's loop

    def listen(self, trainer: Trainer) -> None:
        """Begin to listen to ``trainer``, between two steps."""
        self._global_step, self._stepped, self._units, self._batch_units = trainer.global_step, True, 0.0, None
        self._listener = ProfilerListener.install(trainer, enter=self.enter, leave=self.leave)

    def rest(self, trainer: Trainer) -> None:
        """Stop listening until `listen` is called, between two steps."""
        self._listener.remove(trainer)
        self._end_step()
        self._timeline.drop()

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        if phase == "data":
            if self._validating:
                self.end_validation()  # it had no batches, so that its end was not reported
            if self._stepped:
                self._next_step()
        elif phase == "validation":
            if self._validating:
                return
            self._validating = True
            self._look_later()
        elif phase == "checkpoint":
            self._look_later()
        elif self._validating:
            phase = "validation"  # such as moving its batches
        self._timeline.enter(phase)

    def leave(self) -> None:
        """End the innermost phase."""
        self._timeline.leave()

    def end_validation(self) -> None:
        """End validation."""
        if self._validating:
            self._validating = False
            self._timeline.leave()

    def _next_step(self) -> None:
        self._timeline.step(self._note())
        self._stepped = False
        if self._look is not None:
            self._look, self._skip = self._look.next(), True  # this step contains the start or stop of the profiler
        for step in self._timeline.read():
            self._meter.add(step)
        if self._sampler is not None and self._steps == self._settings.warmup_steps:
            self._sampler.forget()
        if self._looks_now():
            self._look = CloseLook(self._inspected)

    def _end_step(self) -> None:
        """End the open step without beginning another. A skipped batch made no step."""
        if self._stepped or self._has_stepped():
            if not self._stepped:
                self._take_batch()  # its end was not reported
            self._timeline.rest(self._note())
        else:
            self._timeline.drop()
            self._units, self._stepped = 0.0, True

    def _has_stepped(self) -> bool:
        return self._is_manual or self._trainer.global_step != self._global_step

    def _looks_now(self) -> bool:
        due = self._inspection is None and self._look is None and self._steps == self._look_at
        return due and can_look_at(self._device)

    def _look_later(self) -> None:
        """Stop profiling, since the next action is not part of a step, and try again a few times."""
        if self._look is not None:
            self._look.cancel()
            self._look, self._skip = None, True
            self._tries += 1
            if self._tries < _TRIES:
                self._look_at = self._steps + 2

    def _note(self) -> Any:
        """Return the number of units of the ending step, or None if it does not count."""
        units, self._units = self._units, 0.0
        skip, self._skip = self._skip or self._look is not None, False
        trains, self._trains = self._trains, False
        if skip or not trains:
            return None
        # A count on the device has arrived on the host when the device has passed the end of the step.
        return units.to("cpu", non_blocking=True) if isinstance(units, Tensor) else units

    def _inspected(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def begin_batch(self, batch: Any) -> None:
        """Count the units of ``batch``, before the step may change it."""
        if self._count is None:
            self._counts_at_end = fetches_in_step(self._trainer)
        if not self._counts_at_end:
            self._batch_units = self._counted_units(batch)

    def end_batch(self, batch: Any, *, left_out: bool = False) -> None:
        """End a batch, and with the last one of an accumulation a step.

        Args:
            batch: The batch.
            left_out: Whether the training step returned no loss.
        """
        if self._counts_at_end:
            self._batch_units = self._counted_units(batch)
        if not left_out:
            self._take_batch()
        if not self._has_stepped():
            return  # gradients accumulate
        self._global_step, self._stepped = self._trainer.global_step, True
        self._steps += 1
        if self._steps == 1:
            self._training_began = time.perf_counter()
        if is_logging_step(self._trainer):
            self._log()

    def _take_batch(self) -> None:
        if self._batch_units is not None:
            self._units, self._trains, self._batch_units = self._units + self._batch_units, True, None

    @property
    def why_nothing(self) -> str:
        """The reason why nothing was measured, as a part of a sentence."""
        if self._steps <= self._settings.warmup_steps:
            return f"fit ended within {self._settings.warmup_steps} warm-up steps"
        return f"of {self._steps} steps none had a loss or could be counted"

    def _counted_units(self, batch: Any) -> Any:
        if self._count is None:
            self._first_batch(batch)
        assert self._count is not None
        return self._count(batch)

    def end_epoch(self) -> None:
        """End an epoch: the time until the next one is not part of a step."""
        self._end_step()
        self._look_later()

    def close(self, trainer: Trainer) -> None:
        """Restore ``trainer``."""
        self._listener.remove(trainer)
        if self._look is not None:
            self._look.cancel()
        if self._sampler is not None:
            self._sampler.stop()

    # The first batch

    def _first_batch(self, batch: Any) -> None:
        settings = self._settings
        self._unit, self._count, where = counter(settings.unit, settings.count, batch)
        if settings.unit == "auto":
            rank_zero_info(f"TokenThroughput counts {self._unit}, {where}, which unit='auto' found in the first batch.")
        self._names = f"throughput/{self._unit}"
        count = self._count(batch)
        _check_count(count)
        peaks, arithmetic = self._peaks()
        if peaks is None:
            return
        if settings.flops_per_unit is not None:
            model = hardware = settings.flops_per_unit * self._meter.share
            low = 0.0
        else:
            found = self._counted(batch)
            units = float(count)
            if found is None:
                return
            if not found.model or not units:
                nothing = "has no products that can be counted" if units else f"holds no {self._unit}"
                self._why_no_mfu = f"the first batch {nothing}; give flops_per_unit"
                return
            model, hardware, low = (n / units for n in (found.model, found.hardware, found.low_precision))
        self._flops = Flops(
            model=model,
            hardware=hardware,
            low_precision=low,
            peak=peaks.of(arithmetic),
            low_precision_peak=peaks.of("fp8"),
        )

    def _counted(self, batch: Any) -> StepFlops | None:
        module = self._trainer.lightning_module
        try:
            return step_flops(module, batch)
        except NotCopiedError as error:
            self._why_no_mfu = "FLOPs were not counted; give flops_per_unit"
            rank_zero_info(
                f"TokenThroughput did not count the FLOPs of {type(module).__name__}: its step uses {error}."
                " For MFU set flops_per_unit, such as 6 x parameters for each token."
            )
            return None
        except Exception as error:  # noqa: BLE001  (a user's step may raise anything)
            self._why_no_mfu = "FLOPs could not be counted; give flops_per_unit"
            why = quoted(error).rstrip(".")[:300]
            rank_zero_info(
                f"TokenThroughput could not count the FLOPs of {type(module).__name__} on fake tensors: {why}."
                " For MFU set flops_per_unit, such as 6 x parameters for each token."
            )
            return None

    def _peaks(self) -> tuple[Peaks | None, Arithmetic]:
        dtype = _computes_in(self._trainer)
        arithmetic, given = _arithmetic(dtype), self._settings.peak_tflops
        if given is not None and (dtype is not torch.float64 or not isinstance(given, Mapping)):
            peaks = given_peaks(given, arithmetic=arithmetic)
            if peaks.of(arithmetic) is not None:
                return peaks, arithmetic
            self._why_no_mfu = f"the run computes in {arithmetic}, which peak_tflops does not have"
            return None, arithmetic
        name = _device_name(self._device)
        peaks = peaks_of(name) if self._device.type == "cuda" and dtype is not torch.float64 else None
        if peaks is None:
            what = f"{name!r} in float64" if dtype is torch.float64 else repr(name)
            self._why_no_mfu = f"the peak of {what} is not known; give peak_tflops as a number"
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

    def step_times(self) -> Iterator[tuple[int, float]]:
        """Yield the number of each counted step, as loggers know it, and its seconds; after `summary`."""
        for number, seconds in zip(self._meter.numbers, self._meter.seconds, strict=True):
            yield self._first_step + number, seconds

    def summary(self, *, alone: bool = False) -> Summary:
        """Return the figures of the fit. A collective, unless ``alone``."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._end_step()
        self._timeline.end()
        for step in self._timeline.finish():
            self._meter.add(step)
        meter, trainer = self._meter, self._trainer
        ranks = [meter.own()] if alone else _gathered(meter.own())
        now = time.perf_counter()
        found: dict[str, Any] = {}
        if meter.seconds:
            seconds = meter.total_s
            rate = meter.per_device(meter.units, seconds)
            whole = sum(rank.units / rank.seconds * meter.share for rank in ranks if rank.seconds)
            whole *= trainer.world_size / len(ranks)
            found = {
                "units_per_s": whole,
                "units_per_s_per_device": whole / trainer.world_size,
                "units_per_step": meter.units / len(meter.seconds) * meter.replicas,
                "step_s": statistics.median(meter.seconds),
                "step_p95_s": quantile(meter.seconds, 0.95),
                "uneven": meter.uneven,
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
            between_s=meter.between,
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


def _check_count(found: Any) -> None:
    if isinstance(found, Tensor):  # its value is not read, to avoid a synchronization
        ok, what = found.numel() == 1, f"a tensor {[*found.shape]}"
    elif getattr(found, "shape", ()) != ():
        ok, what = False, f"an array {[*found.shape]}"
    else:
        ok, what = hasattr(found, "__float__"), f"{found!r}, a {type(found).__name__}"
    if not ok:
        raise ValueError(
            f"TokenThroughput(count=...) returned {what} for the first batch instead of the number of its units."
            " Return a number, or a tensor of one element (such as mask.sum())."
        )


def _computes_in(trainer: Trainer) -> torch.dtype:
    precision = trainer.precision_plugin
    stated = precision.policy.param if isinstance(precision, PolicyPrecision) else None
    if stated is not None:
        return stated
    if str(precision.precision).startswith(("bf16", "16", "transformer-engine")):
        return torch.bfloat16
    # Without casts it is the dtype of the weights, which may have been loaded in bfloat16.
    weights: Counter[torch.dtype] = Counter()
    for parameter in trainer.lightning_module.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, UninitializedParameter):
            weights[parameter.dtype] += parameter.numel()
    return weights.most_common(1)[0][0] if weights else torch.float32


def _arithmetic(dtype: torch.dtype) -> Arithmetic:
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16"
    return "tf32" if read_tf32().matmul else "fp32"


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
    numbers: dict[str, float] = {
        f"gpu/{name}": value for name, value in reading.items() if isinstance(value, (int, float))
    }
    return numbers | ({"gpu/slowed": float(bool(reading["slowed_by"]))} if "slowed_by" in reading else {})


def _gathered(own: Any) -> list[Any]:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def _hints(trainer: Trainer) -> dict[str, Any]:
    data = trainer.train_dataloader
    loaders = [each for each in tree_leaves(getattr(data, "iterables", data)) if isinstance(each, DataLoader)]
    parts = {
        type(part).__name__
        for part in (*trainer.callbacks, trainer.precision_plugin)  # type: ignore[attr-defined]
        if not (isinstance(part, AccelerationFlags) and not part.flags.gc_interval)  # which is what would be advised
    }
    hints = {
        "parts": parts,
        "log_every_n_steps": trainer.log_every_n_steps if trainer.loggers else 0,  # type: ignore[attr-defined]
        "batch_hooks": _batch_hooks(trainer),
        "batch_callbacks": [
            type(each).__name__
            for each in trainer.callbacks  # type: ignore[attr-defined]
            if not type(each).__module__.startswith(("lightning.", "lightning_ups."))
            and type(each).on_train_batch_end is not Callback.on_train_batch_end
        ],
    }
    if not loaders:
        return hints
    loader = min(loaders, key=lambda each: each.num_workers)  # of several, the one that is waited for the longest
    return hints | {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "batch_size": loader.batch_size,
        "persistent_workers": loader.persistent_workers,
    }


def _batch_hooks(trainer: Trainer) -> list[str]:
    """Return the hooks of the module and the datamodule that work on each batch before its step."""
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None))
        if isinstance(owner, DataHooks)
        for name in ("on_before_batch_transfer", "on_after_batch_transfer")
        if getattr(type(owner), name) is not getattr(DataHooks, name)
    ]


def _short(rate: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if rate >= size:
            return f"{rate / size:.3g}{letter}"
    return f"{rate:.3g}"
