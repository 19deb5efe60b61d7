"""One run of the zoo: one line under one side, in this process. `zoo.py` starts it and keeps what it returns."""

import faulthandler
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override
from zoo_gpu import FOLDER, SharedGpu
from zoo_modules import Line
from zoo_modules.base import Batches, Make, Work

from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config import presets
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy

__all__ = ["ENDLESS", "SIDES", "Meter", "Side", "Steps", "run"]

LOSSES = 30
ENDLESS = 1_000_000  # steps of the only epoch


@dataclass(frozen=True)
class Side:
    """One way to run a line.

    Args:
        settings: Makes arguments of the Trainer; ``callbacks`` come before those of the line.
        compiles: Whether ``torch.compile(module)`` is passed to ``fit``.
        ranks: Processes, each with a GPU.
        steps: Steps of a run that is not timed, for its losses. None: it is timed.
        loop: Trains in place of a Trainer: gets the module, what makes batches, and the meter.
    """

    settings: Callable[[], dict[str, Any]]
    compiles: bool = False
    ranks: int = 1
    steps: int | None = None
    loop: "Callable[[Any, Make, Meter], None] | None" = None


def preset(name: str = "h100") -> dict[str, Any]:
    """Return arguments of the Trainer as a preset of lightning_ups has them."""
    settings = yaml.safe_load(presets.text(name))
    build = partial(instantiate_class, ())
    trainer = {key: value for key, value in settings["trainer"].items() if key != "accelerator"}
    for key in ("plugins", "callbacks"):
        trainer[key] = [build(each) for each in trainer.get(key, ())]
    trainer["callbacks"].insert(0, AccelerationFlags(**settings.get("flags", {})))
    return trainer


def precision() -> dict[str, Any]:
    """Return the precision of the preset alone."""
    return {"plugins": preset()["plugins"]}


def _exact() -> dict[str, Any]:
    torch.backends.cudnn.allow_tf32 = False  # on by default
    return {"precision": "32-true"}


def _stock(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"precision": "bf16-mixed", **more}


SIDES: dict[str, Side] = {
    "stock": Side(_stock()),
    "stock_compile": Side(_stock(), compiles=True),
    "preset": Side(preset),
    "precision": Side(precision),
    "fp32": Side(_exact, steps=12),
    # Deterministic algorithms, for losses that can be equal bit for bit.
    "stock_bits": Side(_stock(deterministic="warn"), steps=6),
    "stock_bits_again": Side(_stock(deterministic="warn"), steps=6),  # whether torch gives them twice
    "precision_bits": Side(lambda: {**precision(), "deterministic": "warn"}, steps=6),
    "stock_ddp": Side(_stock(strategy="ddp"), ranks=2),
    "fsdp2": Side(lambda: {**preset(), "strategy": FSDP2Strategy()}, ranks=2),
    "simple_fsdp": Side(lambda: {**preset(), "strategy": SimpleFSDPStrategy()}, ranks=2),
}


class Meter(Callback):
    """Records losses, time and memory, and ends the run.

    The host waits for the device only after the first step and at the ends of blocks of steps.

    Args:
        began: When ``fit`` was called, by ``time.perf_counter``.
        warm: Steps before anything is timed, and seconds.
        blocks: Number of blocks, and the seconds that each is to take.
        length: Steps of the run, where they are fixed.
        untimed: Ends the run after so many steps.
        after_first: Called after the first step of a run that is timed.
    """

    PROBED, PROFILED = 4, 4  # steps

    def __init__(
        self,
        *,
        began: float,
        warm: tuple[int, float],
        blocks: tuple[int, float],
        length: int | None = None,
        untimed: int | None = None,
        after_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._after_first = after_first
        self._began, self._warm, self._blocks, self._length, self._untimed = began, warm, blocks, length, untimed
        self._losses: list[Tensor] = []
        self._step, self._size, self._next = 0, 0, 0
        self._marks: list[float] = []
        self._profiler: Any = None
        self._first_done = 0.0
        self.found: dict[str, Any] = {}
        self.before: dict[str, Tensor] = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._step <= LOSSES and isinstance(loss, Tensor):
            self._losses.append(loss.detach().float().clone())
        if self._step == 1:
            self._first_done = _now()
            self.found["first_step_s"] = round(self._first_done - self._began, 2)
            if self._untimed is None:
                if torch.cuda.is_available():
                    self.found["first_step_gib"] = _peak()
                self._after_first()
                self._first_done = _now()
        if self._untimed is not None:
            trainer.should_stop = self._step >= self._untimed
            return
        self._time(trainer)

    def _time(self, trainer: Trainer) -> None:
        """Go on from warm-up to probing, to the blocks, to the profiler, to the end."""
        if not self._next:
            if self._is_warm(trainer):
                self._next = self._step + self.PROBED
                self._marks = [_now()]
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
            return
        if self._step < self._next:
            return
        now = _now()
        if self._profiler is not None:
            self.found["busy"] = _busy(self._profiler, self.PROFILED * self.found["step_ms"] / 1e3)
            self._profiler = None
            trainer.should_stop = self._length is None
            self._next = ENDLESS
        elif not self._size:
            self._size = int(trainer.strategy.broadcast(self._fitting((now - self._marks[0]) / self.PROBED)))
            self._marks, self._next = [now], self._step + self._size
        else:
            self._marks.append(now)
            self._next = self._step + self._size
            if len(self._marks) > self._blocks[0]:
                self._end_blocks()

    def _is_warm(self, trainer: Trainer) -> bool:
        if self._step < self._warm[0]:
            return False
        is_warm = self._length is not None or time.perf_counter() - self._first_done >= self._warm[1]
        return bool(trainer.strategy.broadcast(is_warm))

    def _fitting(self, step_s: float) -> int:
        """Return the steps of a block."""
        number, seconds = self._blocks
        wanted = max(2, min(1000, round(seconds / step_s)))
        if self._length is None:
            return wanted
        return max(1, min(wanted, (self._length - self._step - self.PROFILED - 2) // number))

    def _end_blocks(self) -> None:
        times = [(end - start) / self._size * 1e3 for start, end in pairwise(self._marks)]
        self.found |= {
            "step_ms": round(median(times), 4),
            "blocks_ms": [round(each, 4) for each in times],
            "block_steps": self._size,
        }
        self._next = self._step + self.PROFILED
        if torch.cuda.is_available():
            self.found["peak_gib"] = _peak()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        else:
            self._profiler = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["losses"] = [loss.item() for loss in self._losses]
        self.found["steps"] = self._step
        unchanged, seen = [], set[str]()
        for name, parameter in pl_module.named_parameters():
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            seen.add(name)
            if name in self.before and torch.equal(value.detach().cpu(), self.before[name].to(value.dtype)):
                unchanged.append(name)
        self.found |= {"unchanged": unchanged, "renamed": sorted(self.before.keys() - seen)[:10]}

    def losses_so_far(self) -> list[float]:
        """Return the losses, for a run that failed."""
        with suppress(Exception):
            return [loss.item() for loss in self._losses]
        return []


class Steps:
    """What a `Meter` needs of a Trainer, for a loop without one."""

    def __init__(self) -> None:
        self.should_stop, self.steps, self.strategy = False, 0, self

    def broadcast(self, value: Any) -> Any:
        """Return ``value``: there is one process."""
        return value


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak() -> float:
    """Return the peak of allocated memory, with what CUDA graphs keep in pools of their own between replays."""
    segments = torch.cuda.memory_snapshot()
    private = (s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    kept = sum(segment["total_size"] - segment["allocated_size"] for segment in private)
    return round((torch.cuda.max_memory_allocated() + kept) / 2**30, 3)


def _busy(profiler: Any, seconds: float) -> float | None:
    """Return the share of ``seconds`` in which the device had work; None without a profile."""
    if not profiler:
        return None
    try:
        profiler.stop()
        spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if _is_on_device(e))
    except Exception as error:  # noqa: BLE001  (a profiler that fails is no reason to lose the run)
        warnings.warn(f"the profiler failed: {error}", stacklevel=1)
        return None
    total, end = 0.0, float("-inf")
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return round(total / 1e6 / seconds, 3)


def _is_on_device(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


def run(line: Line, side: Side, *, tiny: bool, limit: float, blocks: tuple[int, float]) -> dict[str, Any]:
    """Run ``line`` under ``side``, and return what was found, or the error.

    Args:
        line: To run.
        side: How.
        tiny: Whether at the size for a CPU.
        limit: Seconds after which the process ends, with a traceback of where it was; it may share a GPU meanwhile.
        blocks: Number of timed blocks, and the seconds that each is to take.
    """
    torch.manual_seed(0)
    began = time.perf_counter()
    work = line.build(tiny)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in work.module.parameters())}
    found["build_s"] = round(time.perf_counter() - began, 1)
    gpu = SharedGpu(Path(folder) if (folder := os.environ.get(FOLDER)) else None)
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        with gpu.shared():
            if torch.cuda.is_available():
                found["card"] = torch.cuda.get_device_name(0)
            found |= _fit(work, line, side, gpu, tiny=tiny, blocks=blocks)
    finally:
        faulthandler.cancel_dump_traceback_later()
    found["waited_s"] = round(gpu.waited_s, 1)
    return found


def _fit(
    work: Work, line: Line, side: Side, gpu: SharedGpu, *, tiny: bool, blocks: tuple[int, float]
) -> dict[str, Any]:
    settings = side.settings()
    before, after = [*settings.pop("callbacks", ())], [*work.callbacks()]
    if settings.get("strategy") == "ddp" and line.unused:
        settings["strategy"] = "ddp_find_unused_parameters_true"
    on_gpu = torch.cuda.is_available()
    epoch = work.epoch or ENDLESS
    accumulated = work.trainer.get("accumulate_grad_batches", 1)
    # A callback that acts on epochs has acted by the second one; what is compiled goes on being compiled for a while.
    # A preset also compares whole steps in up to three ways.
    steps, seconds = (2, 0.0) if tiny else (60 if before else 12, 1.5 if side.compiles or before else 1.0)
    warm = (work.epoch or 0) + steps, seconds
    meter = Meter(
        began=time.perf_counter(),
        warm=warm,
        blocks=blocks,
        length=work.steps,
        untimed=side.steps and side.steps * accumulated,
        after_first=gpu.take_long,
    )
    meter.before = {name: p.detach().clone() for name, p in work.module.named_parameters()}
    found: dict[str, Any] = {}
    try:
        if side.loop is not None:
            torch.manual_seed(1)
            side.loop(work.module, work.batch, meter)
            return meter.found
        trainer = Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=side.ranks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=-1 if work.steps is None else work.steps // epoch,
            callbacks=[*before, *after, meter],
            **work.trainer,
            **settings,
        )
        torch.manual_seed(1)
        _seed_others()
        module: Any = torch.compile(work.module) if side.compiles else work.module
        trainer.fit(module, datamodule=Batches(work.batch, epoch=epoch))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a module raises is what is looked for)
        text = traceback.format_exc()
        found |= {"error": text[-4000:], "error_line": _last_line(error), "losses": meter.losses_so_far()}
    return {**meter.found, **found}


def _seed_others() -> None:
    import random

    import numpy as np

    random.seed(1)
    np.random.seed(1)


def _last_line(error: BaseException) -> str:
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return lines[0][:300] if len(lines) == 1 else f"{lines[0][:200]} ... {lines[-1][:200]}"
