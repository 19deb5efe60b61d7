"""A callback that diagnoses a fit: it measures real steps, then runs experiments on one batch, and reports rows."""

import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups._compat.environment import usable_cores
from lightning_ups._compat.lightning.running_fit import save_interval
from lightning_ups._compat.optional.nvml import Sampler, sensor
from lightning_ups._compat.torch.device import Kernels, allocator_counters, device_memory, watched_waits
from lightning_ups.insight.diagnose import experiments, links
from lightning_ups.insight.diagnose.experiments import Bench, Facts
from lightning_ups.insight.diagnose.phases import PhaseProfiler
from lightning_ups.insight.throughput import Inspection, Span, inspect_spans
from lightning_ups.order import Run
from lightning_ups.transforms.patching import instead_of
from lightning_ups.transforms.quoted import quoted

Row = dict[str, Any]
_ASKED_AT = 3  # steps before the length of the warm-up is chosen
_PHASES = ("data", "transfer", "forward", "backward", "optimizer", "checkpoint", "logging", "between epochs", "other")


class Probe(Callback):
    """Measure real training steps, then run each experiment.

    Args:
        report: Called on rank 0 with a row when an experiment starts, and with another one when it ends.
        seconds: How long real steps are measured; an experiment takes about a third of it.
        skip: Names of experiments to leave out.
        only_steps: Measure real steps and run no experiment.
        loader: Arguments that replace those of each DataLoader, such as ``{"num_workers": 4}``.
        optimizer: Values that replace those of each parameter group, such as ``{"fused": True}``.
        within: Seconds after the warm-up in which experiments start.
        done: Called on each rank at the end. None: the fit stops.
    """

    def __init__(
        self,
        report: Callable[[Row], None],
        *,
        seconds: float = 20.0,
        skip: Sequence[str] = (),
        only_steps: bool = False,
        loader: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        within: float = float("inf"),
        done: Callable[[Trainer], None] | None = None,
    ) -> None:
        self._report, self._seconds, self._skip, self._only_steps = report, seconds, {*skip}, only_steps
        self._loader, self._optimizer, self._within, self._done = loader or {}, optimizer or {}, within, done
        self._undo = ExitStack()
        self._steps, self._warmup, self._last = 0, _ASKED_AT, float("inf")
        self._phases: PhaseProfiler | None = None
        self._is_over = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._loader:
            stock, given = DataLoader.__init__, self._loader

            @wraps(stock)
            def create(*args: Any, **options: Any) -> None:
                chosen = {**inspect.signature(stock).bind(*args, **options).arguments, **given}
                chosen["persistent_workers"] = chosen.get("num_workers", 0) > 0
                stock(chosen.pop("self"), **chosen)

            self._undo.enter_context(instead_of(DataLoader, "__init__", create))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.update(self._optimizer)
        self._phases = PhaseProfiler(trainer)
        self._undo.callback(self._phases.close)
        self._tell(trainer, {"start": "warm-up"})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        phases = self._phases
        if phases is None or self._is_over:
            return
        self._steps += 1
        if self._steps == 1:
            self._from = time.perf_counter(), 1
        if self._steps == _ASKED_AT:  # ranks count alike, so that each broadcast is met
            wanted = min(20, max(_ASKED_AT + 1, int(self._seconds / 3 / self._step_s())))
            self._warmup = trainer.strategy.broadcast(wanted)
        if self._steps == _ASKED_AT + (self._warmup - _ASKED_AT) // 2:
            self._from = time.perf_counter(), self._steps
        if self._steps > _ASKED_AT and self._steps == self._warmup:
            self._warm = time.monotonic()
            if "steps" in self._skip:
                self._experiments(trainer, batch)
                return
            wanted = int(min(300, max(8, self._seconds / self._step_s())))
            self._last = self._steps + trainer.strategy.broadcast(wanted)
            self._tell(trainer, {"start": "steps"})
            self._start_measuring(trainer)
        elif self._steps == self._last:
            facts = self._measured(trainer, phases) | {"batch_rows": experiments.batch_size(batch)}
            self._tell(trainer, {"end": "steps", "facts": facts})
            if self._only_steps or trainer.strategy.root_device.type != "cuda":
                self._experiments(trainer, batch)
            else:
                self._look(0)
        elif self._steps > self._last and (found := self._look(self._steps - int(self._last))) is not None:
            self._tell(trainer, {"end": "device", "facts": self._across_ranks(trainer, found)})
            self._experiments(trainer, batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._phases is not None:
            self._phases.start("[Callback]Loop.on_validation_start")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._phases is not None:
            self._phases.stop("[Callback]Loop.on_validation_start")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._phases is not None:
            self._phases.rest()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._is_over = True
        self._tell(trainer, {"end": "steps", "error": quoted(exception)})

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()
        if not self._is_over and self._phases is not None:
            self._tell(trainer, {"end": "steps", "error": f"training ended after {self._steps} steps"})

    # Real steps

    def _step_s(self) -> float:
        start, step = self._from
        return max((time.perf_counter() - start) / max(1, self._steps - step), 1e-6)

    def _start_measuring(self, trainer: Trainer) -> None:
        assert self._phases is not None
        device = trainer.strategy.root_device
        self._sampler = None
        if device.type == "cuda" and (read := sensor(device)) is not None:
            self._sampler = Sampler(read)
            self._sampler.start()
        self._counters = dict(allocator_counters(device))
        self._phases.reset()
        self._phases.is_on = True

    def _measured(self, trainer: Trainer, phases: PhaseProfiler) -> Facts:
        device = trainer.strategy.root_device
        phases.finish()
        shares, steps = phases.shares(), len(phases.step_seconds)
        hooks = {name: share for name, share in shares.items() if name not in _PHASES}
        compiled = sum(each.seconds for each in phases.compilations)
        guards = Counter(each.guard for each in phases.compilations if each.guard)
        total = max(sum(phases.seconds.values()), 1e-9)
        facts: Facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "world_size": trainer.world_size,
            "steps": steps,
            "mean_s": phases.mean_s,
            "shares": {name: shares.get(name, 0.0) for name in _PHASES if name in shares},
            "hooks": dict(sorted(hooks.items(), key=lambda each: -each[1])),
            "host": {name: phases.host_seconds[name] / total for name in ("logging", *hooks)},
            "compile_share": min(compiled / total, 1.0),
            "compilations": len(phases.compilations),
            "guard": guards.most_common(1)[0][0] if guards else "",
            "accumulate": trainer.accumulate_grad_batches,
            "log_every": trainer.log_every_n_steps,  # type: ignore[attr-defined]
            "is_logging": bool(trainer.loggers),
            "is_compiled": any(type(callback).__name__ == "Compile" for callback in Run.of(trainer).callbacks),
            "saves": phases.saves,
            **_loader_facts(trainer),
        }
        own = sum(seconds for name, seconds in phases.seconds.items() if name not in ("backward", "optimizer"))
        facts["own_s"] = own / max(1, steps)
        facts["checkpoint_share"] = shares.get("checkpoint", 0.0)
        if device.type == "cuda":
            now, total_memory = allocator_counters(device), device_memory(device) or 1
            for fact, name in (("retries_per_step", "num_alloc_retries"), ("allocations_per_step", "num_device_alloc")):
                facts[fact] = (now.get(name, 0) - self._counters.get(name, 0)) / max(1, steps)
            facts["memory_used"] = now.get("reserved_bytes.all.peak", 0) / total_memory
            reserved = now.get("reserved_bytes.all.current", 0) or 1
            facts["fragmentation"] = now.get("inactive_split_bytes.all.current", 0) / reserved
        if self._sampler is not None:
            self._sampler.stop()
            facts["gpu"] = self._sampler.summary()
        elif device.type == "cuda":
            facts["gpu"] = links.gpu_state(device)
        return self._across_ranks(trainer, facts)

    def _save(self, trainer: Trainer, phases: PhaseProfiler) -> Facts:
        """Return the share of checkpoints that are saved every so many steps. Saves one if none was measured."""
        every = save_interval(trainer)
        if not every:
            return {}
        if not phases.saves:
            start = time.perf_counter()
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "diagnose.ckpt")
            save_s = time.perf_counter() - start
        else:
            save_s = phases.seconds["checkpoint"] / phases.saves
        own_s = (sum(phases.seconds.values()) - phases.seconds["checkpoint"]) / max(1, len(phases.step_seconds))
        share = save_s / (every * own_s + save_s)
        return {"checkpoint_share": share, "save_every": every // trainer.accumulate_grad_batches, "save_s": save_s}

    def _across_ranks(self, trainer: Trainer, facts: Facts) -> Facts:
        """Add what the ranks say together to the facts of this rank. A collective."""
        if trainer.world_size < 2:
            return facts
        ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(ranks, {name: facts.get(name) for name in ("own_s", "exposed")})
        if own := [rank["own_s"] for rank in ranks if rank["own_s"] is not None]:
            worst = max(range(len(own)), key=own.__getitem__)
            others = statistics.median(seconds for rank, seconds in enumerate(own) if rank != worst)
            facts |= {"slowest_rank": worst, "slowest_s": own[worst], "others_s": others}
        if exposed := [rank["exposed"] for rank in ranks if rank["exposed"] is not None]:
            facts["exposed"] = min(exposed)  # on the others it contains the wait for a slow rank
        return facts

    def _look(self, step: int) -> Facts | None:
        """Watch one step for waits of the host, let one pass, record the kernels of two, and return the facts."""
        if step == 0:
            self._waits = Counter[str]()
            self._watch = self._undo.enter_context(ExitStack())
            self._watch.enter_context(watched_waits(self._waits))
        elif step == 1:
            self._watch.close()
            self._kernels = Kernels()
            self._kernels.start()
        elif step == 2:
            self._kernels.mark()
        elif step == 4:
            self._kernels.mark()
            spans = [Span(*kernel) for kernel in self._kernels.stop()]
            seen = inspect_spans(spans, steps=2, waits=self._waits.most_common())
            idle = _idle(seen, step_s=self._phases.mean_s if self._phases is not None else 0.0)
            return {"idle": idle, "exposed": seen.exposed_communication, "waits": [*seen.waits]}
        return None

    # Experiments

    def _experiments(self, trainer: Trainer, batch: Any) -> None:
        assert self._phases is not None
        self._is_over = True
        self._phases.is_on = False
        if not self._only_steps:
            bench = Bench(trainer, batch, seconds=self._seconds / 3)
            for name, run in self._runs(trainer, bench).items():
                is_late = trainer.strategy.broadcast(time.monotonic() > self._warm + self._within)
                if name not in self._skip and not is_late:
                    self._tell(trainer, {"start": name})
                    self._tell(trainer, {"end": name, **_tried(run)})
        self._tell(trainer, {"end": "all"})
        trainer.should_stop = True
        if self._done is not None:
            self._done(trainer)

    def _runs(self, trainer: Trainer, bench: Bench) -> dict[str, Callable[[], Facts]]:
        device, runs = bench.device, dict[str, Callable[[], Facts]]()
        is_automatic = trainer.lightning_module.automatic_optimization
        runs["parts"] = lambda: experiments.parts(bench) if is_automatic else {}
        if (phases := self._phases) is not None and phases.step_seconds:
            runs["checkpoint"] = lambda: self._save(trainer, phases)
        runs["loader"] = lambda: _loader_rate(trainer, seconds=self._seconds / 3)
        runs["batches"] = lambda: experiments.batches(bench) if is_automatic else {}
        runs["optimizer"] = lambda: experiments.optimizer(bench) if is_automatic else {}
        if trainer.world_size > 1:
            runs["exchange"] = lambda: experiments.exchange(bench) if is_automatic else {}
            runs["collectives"] = lambda: {"collectives": links.collective_rates(device)}
        if device.type == "cuda":
            runs["TF32"] = lambda: experiments.tf32(bench)
            runs["topology"] = lambda: {"topology": links.topology(device)}
        runs["bandwidth"] = lambda: {"bandwidth": links.copy_rates(device)}
        runs["operators"] = lambda: experiments.roofline(bench)
        return runs

    def _tell(self, trainer: Trainer, row: Row) -> None:
        if trainer.is_global_zero:
            self._report(row)


def _idle(seen: Inspection, *, step_s: float) -> float:
    """Return the share of a step in which the device does nothing.

    The profiler makes the gaps between kernels longer, so the time of the kernels is compared with ``step_s``, that of
    a step without the profiler.
    """
    idle = seen.idle or 0.0
    return min(idle, max(0.0, 1 - (1 - idle) * seen.seconds / step_s)) if step_s else idle


def _tried(run: Callable[[], Facts]) -> Row:
    try:
        return {"facts": run()}
    except Exception as error:  # noqa: BLE001  (one experiment costs one row)
        return {"error": quoted(error)}


def _loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    data = trainer.train_dataloader
    return [each for each in tree_leaves(getattr(data, "iterables", data)) if isinstance(each, DataLoader)]


def _loader_facts(trainer: Trainer) -> Facts:
    loaders = _loaders(trainer)
    data = getattr(trainer, "datamodule", None)
    facts: Facts = {
        "cores": max(1, usable_cores() // max(1, trainer.world_size)),
        "data_settings": [*inspect.signature(type(data).__init__).parameters] if data is not None else [],
        "model_settings": [*inspect.signature(type(trainer.lightning_module).__init__).parameters],
    }
    if loaders:
        first = min(loaders, key=lambda each: each.num_workers)
        facts |= {"workers": first.num_workers, "is_pinned": first.pin_memory, "persistent": first.persistent_workers}
    return facts


def _loader_rate(trainer: Trainer, *, seconds: float) -> Facts:
    """Return how many samples per second the loader alone delivers, once its queue is empty."""
    loaders = _loaders(trainer)
    if len(loaders) != 1:
        return {}
    loader = loaders[0]
    queued = loader.num_workers * (loader.prefetch_factor or 0)
    batches, rows, start = iter(loader), 0, None
    for index, batch in enumerate(islice(batches, 200 + queued)):
        now = time.perf_counter()
        if start is not None:
            rows += experiments.batch_size(batch) or 0
            if now - start > seconds:
                break
        elif index >= queued:
            start = now
    if start is None or not rows:
        return {}
    return {"loader_rate": rows / (time.perf_counter() - start)}
