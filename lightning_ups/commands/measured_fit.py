"""Measure a fit until its rate has settled, without logs, checkpoints or validation, for `tune` and `ablate`."""

import faulthandler
import json
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
    Timer,
)
from typing_extensions import override

from lightning_ups._compat.torch.device import CudaClock
from lightning_ups.callbacks import RunManifest, TextSample, TokenThroughput, TrainingReport, UnigramBaseline
from lightning_ups.commands.trial import Continued, Nowhere, Only, Patience, endless
from lightning_ups.config.errors import short_text
from lightning_ups.config.layers import items
from lightning_ups.insight.throughput import Count, clock_for, counter
from lightning_ups.insight.tune import Result, Steady, failure_of, steady

# They write files, print, stop the run, or need what a trial lacks.
_LEFT_OUT = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
    RunManifest,
    TextSample,
    Timer,
    TokenThroughput,
    TrainingReport,
    UnigramBaseline,
)
_LOSSES = 8  # optimizer steps whose losses are kept
_LEAST_STEPS = 8  # are timed, also if the run has fewer
_FAR_BEHIND = 0.7  # of the floor


class Timed(NamedTuple):
    """An optimizer step."""

    seconds: float
    samples: float
    tokens: float


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ``measured_fit``, and the words that are options of fit."""
    parser = ArgumentParser(prog="python -m lightning_ups measured_fit", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="where the result is written")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring at most, after the first step")
    parser.add_argument("--precision", type=float, default=0.01, help="the standard error of a rate that has settled")
    parser.add_argument("--floor", type=float, default=0.0, help="samples per second; end early if far below")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which the process ends itself")
    parser.add_argument("--began", type=float, default=time.time(), help="when the process was started")
    own, rest = parser.parse_known_args(argv)
    return vars(own), rest


def measure(
    fit: Callable[..., Any], *, folder: Path, seconds: float, precision: float, floor: float, limit: float, began: float
) -> int:
    """Call ``fit`` with a function that arranges the Trainer, and write the result or the failure to ``folder``."""
    watch = Stopwatch(folder, seconds=seconds, precision=precision, floor=floor, began=began)

    def arrange(settings: Mapping[str, Any], callbacks: Sequence[Callback]) -> tuple[dict[str, Any], list[Callback]]:
        has_timer = any(isinstance(each, Timer) for each in (*items(settings.get("callbacks")), *callbacks))
        limits = {"max_epochs": -1} if endless(settings, has_timer=has_timer) else {}
        return {**_arranged(settings, folder), **limits}, [*_kept(callbacks), Only(_is_kept), Patience(), watch]

    # The engine kills this process earlier, unless it was killed itself. Works within a C extension, too.
    faulthandler.dump_traceback_later(1.2 * limit + 10, exit=True, file=2)
    try:
        fit(arrange=arrange)
    except BaseException as error:
        refusal = short_text(error) if isinstance(error, Exception) else None
        failure = failure_of(error, refusal=refusal and refusal.removeprefix("error: "))
        (folder / f"failure-{os.getpid()}.json").write_text(json.dumps(failure.as_dict()))
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def _arranged(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {
        **settings,
        "callbacks": _kept(items(settings.get("callbacks"))),
        "min_steps": None,
        "min_epochs": None,
        "max_time": None,
        "fast_dev_run": False,
        "logger": Nowhere(str(folder)),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
    }


def _kept(callbacks: Sequence[Callback]) -> list[Callback]:
    return [callback for callback in callbacks if _is_kept(callback)]


def _is_kept(callback: Callback) -> bool:
    return not isinstance(callback, _LEFT_OUT)


class Stopwatch(Continued):
    """Times optimizer steps until their rate has settled or the run ends, then stops it and writes the result.

    Under manual optimization, a step is a batch.
    """

    def __init__(self, folder: Path, *, seconds: float, precision: float, floor: float, began: float) -> None:
        self._folder, self._seconds, self._precision = folder, seconds, precision
        self._floor, self._began = floor, began
        self._within: list[Timed] = []  # steps within an epoch
        self._across: list[Timed] = []  # steps that contain the end of an epoch
        self._marks: list[Any] = []  # of steps that were not
        self._losses: list[list[torch.Tensor]] = [[]]
        self._batch_samples = self._batch_tokens = 0.0
        self._start_s = self._steps = self._batches = 0
        self._next_look = 1
        self._skips = False  # the step that runs contains the end of an epoch
        self._pruned = False
        self._count: tuple[Count, Count | None] | None = None
        self._throughput: TokenThroughput | None = None
        self._memory: CudaClock | None = None
        self._earlier_peak: int | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = clock_for(trainer.strategy.root_device)
        self._before = trainer.global_step
        if (device := trainer.strategy.root_device).type == "cuda":
            self._count_flops(trainer, TokenThroughput(inspect_at=None, table=False, progress_bar=False))
            self._memory = CudaClock(device)
            self._memory.reset_peak()

    def _count_flops(self, trainer: Trainer, throughput: TokenThroughput) -> None:
        """Let ``throughput`` count the FLOPs of the first batch, if the peak of the device is known."""
        self._throughput = throughput
        throughput.open(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._skips = self._batches > 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._throughput is not None:
            self._throughput.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        samples, tokens = self._counted(batch)
        self._batch_samples += samples
        self._batch_tokens += tokens

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        had_ended = self.has_ended
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._batches += 1
        if self._throughput is not None and self._batches == 1:
            self._throughput.pause(trainer)  # its marks would take time of the steps that are measured here
        if len(self._losses) <= _LOSSES and (loss := _loss_of(outputs)) is not None:
            self._losses[-1].append(loss)
        has_stepped = trainer.global_step != self._before or not pl_module.automatic_optimization
        if not has_stepped:
            return
        self._before = trainer.global_step
        self._steps += 1
        self._losses.append([])
        self._marks.append((self._clock.mark(), self._batch_samples, self._batch_tokens, self._skips))
        self._batch_samples, self._batch_tokens, self._skips = 0.0, 0.0, False
        if self._steps >= self._next_look or self.has_ended != had_ended:
            self._look(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()
        result = self._result(trainer)
        if trainer.is_global_zero:
            draft = self._folder / "result.draft"
            draft.write_text(json.dumps(result.as_dict()))
            draft.rename(self._folder / "result.json")

    def _look(self, trainer: Trainer) -> None:
        """Read the times, and stop the run if they are enough. All ranks look after the same steps."""
        self._read()
        if self._steps == 1:
            self._start_s = time.time() - self._began
            self._measuring_since = time.perf_counter()
        self._next_look = max(self._steps + 1, self._steps * 3 // 2)
        if trainer.is_global_zero:
            (self._folder / "steps").write_text(str(self._steps))
        if trainer.strategy.broadcast(self._is_enough(trainer)):
            if self._memory is None or self._earlier_peak is not None or self.has_ended:
                trainer.should_stop = True
            else:  # one more step, for its peak: that of the steps that recorded CUDA graphs has their memory already
                self._earlier_peak, self._next_look = self._memory.peak(), self._steps + 1
                self._memory.reset_peak()
        self._marks = [(self._clock.mark(), 0.0, 0.0, False)]  # looking is not a part of the next step

    def _read(self) -> None:
        self._clock.wait()
        for (first, *_), (last, samples, tokens, skips) in zip(self._marks, self._marks[1:], strict=False):
            timed = self._across if skips else self._within
            timed.append(Timed(self._clock.seconds(first, last), float(samples), float(tokens)))
        self._marks = self._marks[-1:]

    @property
    def _timed(self) -> list[Timed]:
        """Steps without the ends of epochs, unless each epoch has one step."""
        return self._within or self._across

    def _is_enough(self, trainer: Trainer) -> bool:
        if not self._timed:
            return False
        found = steady([each.seconds for each in self._timed])
        # The first steps may contain a compilation or the capture of CUDA graphs, and do not count.
        is_even = len(found.seconds) >= 3 and max(found.seconds) < 2 * min(found.seconds)
        if not is_even and len(self._timed) < _LEAST_STEPS:
            return False
        if len(found.seconds) >= 4 and self._rate(found, trainer) < _FAR_BEHIND * self._floor:
            self._pruned = True
            return True
        is_exact = found.error <= self._precision and sum(found.seconds) >= 0.1 * self._seconds
        ends = self.has_ended and len(self._timed) >= _LEAST_STEPS
        is_long = sum(found.seconds) > self._seconds or time.perf_counter() - self._measuring_since > 3 * self._seconds
        return ends or is_long or (found.has_settled and is_exact)

    def _rate(self, found: Steady, trainer: Trainer) -> float:
        samples = sum(each.samples for each in self._timed[found.warmup :])
        return _replicas(trainer) * samples / sum(found.seconds)

    def _result(self, trainer: Trainer) -> Result:
        if not self._timed:
            text = f"No step was timed in {self._batches} batches: training stopped, or no batch had an optimizer step."
            return Result(failure="refused", text=text)
        device, found = trainer.strategy.root_device, steady([each.seconds for each in self._timed])
        low, middle, high = found.quartiles
        peak = _peak_of_process()
        if self._memory is not None:  # tensors of a CUDA graph that is replayed do not count as allocated
            peak = max(self._memory.peak() + self._memory.recorded(), self._earlier_peak or 0)
        # Lightning divides the loss of a microbatch by their number.
        count = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        losses = [count * torch.stack(each).float().mean() for each in self._losses[:_LOSSES] if each]
        mean = trainer.strategy.reduce(torch.stack(losses), reduce_op="mean") if losses else torch.zeros(0)
        peak = trainer.strategy.reduce(torch.tensor(float(peak), device=device), reduce_op="max")
        rate = self._rate(found, trainer)
        tokens = sum(each.tokens for each in self._timed[found.warmup :])
        tokens_per_s = _replicas(trainer) * tokens / sum(found.seconds) if tokens else None
        return Result(
            samples_per_s=rate,
            tokens_per_s=tokens_per_s,
            step_s=sum(found.seconds) / len(found.seconds),
            spread=(high - low) / middle,
            error=found.error if len(found.seconds) > 1 else 1.0,
            steps=len(found.seconds),
            warmup=self._steps - len(found.seconds),
            peak_bytes=int(peak),
            mfu=self._mfu(trainer, samples_per_s=rate, tokens_per_s=tokens_per_s),
            start_s=self._start_s,
            losses=[float(loss) for loss in mean],
            schedules=_schedules(trainer),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            devices=trainer.world_size,
            is_pruned=self._pruned,
        )

    def _mfu(self, trainer: Trainer, *, samples_per_s: float, tokens_per_s: float | None) -> float | None:
        if self._throughput is None:
            return None
        self._throughput.resume(trainer)
        self._throughput.on_train_end(trainer, trainer.lightning_module)
        summary = self._throughput.summary
        if summary is None or summary.flops is None:
            return None
        rate = tokens_per_s if summary.unit == "tokens" else samples_per_s
        return summary.flops.utilisation((rate or 0.0) / trainer.world_size).get("mfu")

    def _counted(self, batch: Any) -> tuple[float, float]:
        if self._count is None:
            unit, auto, _ = counter("auto", None, batch)
            tokens = auto if unit == "tokens" else None
            try:
                _, samples, _ = counter("samples", None, batch)
            except ValueError:
                samples = auto  # batches
            self._count = samples, tokens
        samples, tokens = self._count
        return float(samples(batch)), float(tokens(batch)) if tokens is not None else 0.0


def _loss_of(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach().clone() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _peak_of_process() -> int:
    """Return the bytes that this process has had at most; 0 on Windows, where Python does not know them."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _schedules(trainer: Trainer) -> list[int]:
    """Return after how many optimizer steps each scheduler that counts steps is called: Lightning counts batches."""
    batches = trainer.accumulate_grad_batches
    configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
    return [lcm(batches, each.frequency) // batches for each in configs]


def _replicas(trainer: Trainer) -> int:
    return (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": trainer.world_size})[
        "num_replicas"
    ]
