"""Where the time of training steps goes: the phases of Lightning's loop, each callback hook, and logging."""

import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_ups._compat.torch.compile.dynamo import Mark, compilations_since, compiled_since, mark
from lightning_ups.insight.throughput import PAUSES, Timeline, clock_for, phase_of
from lightning_ups.transforms.patching import instead_of

_HOOK = re.compile(r"\[(?:Callback|LightningModule)\](\w+).*\.(on_\w+)")
_INTERNAL = ("Probe.", "on_before_zero_grad", "on_train_start")


class PhaseProfiler(Profiler):
    """Splits training steps into phases, as the profiler of a Trainer. A step is a batch.

    On a GPU the time of a phase is the time for which the device waited for it or worked for it.

    Args:
        trainer: The Trainer, whose training has started.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._timeline = Timeline(clock_for(trainer.strategy.root_device))
        self._bars = {type(each).__name__ for each in trainer.callbacks if isinstance(each, ProgressBar)}
        self._open: list[str] = []
        self._names: dict[str, str | None] = {}
        self._undo = ExitStack()
        self._mark: Mark = mark()
        self.is_on, self._thread = False, threading.get_ident()
        self.reset()
        self._stock, trainer.profiler = trainer.profiler, self
        self._undo.callback(setattr, trainer, "profiler", self._stock)
        self._time_logging(trainer)

    def reset(self) -> None:
        """Forget all steps so far."""
        self._timeline.drop()
        list(self._timeline.finish())
        self.step_seconds: list[float] = []
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, with pauses and ``"between epochs"``
        self.host_seconds: dict[str, float] = defaultdict(float)  # of the host, whether the device waits or not
        self._since = time.perf_counter()
        self.saves = 0
        self.compilations: list[Any] = []
        self._mark = mark()

    def close(self) -> None:
        """Restore the Trainer."""
        self._undo.close()

    def rest(self) -> None:
        """End the open step at the end of an epoch."""
        if self.is_on:
            self._timeline.rest()

    def finish(self) -> None:
        """Stop; the open step does not count."""
        self._timeline.drop()
        self._next(ends=True)
        self.is_on = False

    @override
    def start(self, action_name: str) -> None:
        name = self._name(action_name)
        if not self.is_on or name is None:
            return
        if name == "data" and not self._open:
            self._next(ends=False)
        self.saves += name == "checkpoint"
        self._enter(name)

    @override
    def stop(self, action_name: str) -> None:
        if self.is_on and self._name(action_name) is not None:
            self._leave()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Attribute the time within the context to the phase ``name``."""
        if not self.is_on:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def shares(self) -> dict[str, float]:
        """Return the share of each phase in the measured time."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}

    @property
    def mean_s(self) -> float:
        """Seconds per step, with checkpoints and the time between epochs."""
        return sum(self.seconds.values()) / max(1, len(self.step_seconds))

    def _next(self, *, ends: bool) -> None:
        self._timeline.end() if ends else self._timeline.step()
        if compiled_since(self._mark):
            self.compilations += compilations_since(self._mark)[0]
            self._mark = mark()
        for step in self._timeline.finish() if ends else self._timeline.read():
            for name, seconds in step.pauses.items():
                if name == "checkpoint":  # validation is cut short in a trial
                    self.seconds[name] += seconds
            if step.between:
                self.seconds["between epochs"] += step.seconds
                continue
            self.step_seconds.append(step.seconds)
            for name, seconds in (step.split or {}).items():
                self.seconds[name] += seconds

    def _enter(self, name: Any) -> None:
        if name != "checkpoint" and any(each in PAUSES for each in self._open):  # all of it belongs to the pause
            name = self._open[-1]
        self._count_host()
        self._open.append(name)
        self._timeline.enter(name)

    def _leave(self) -> None:
        self._count_host()
        if self._open:
            self._open.pop()
            self._timeline.leave()

    def _count_host(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.host_seconds[self._open[-1]] += now - self._since
        self._since = now

    def _name(self, action: str) -> str | None:
        if action not in self._names:
            self._names[action] = self._find(action)
        return self._names[action]

    def _find(self, action: str) -> str | None:
        if (phase := phase_of(action)) is not None:
            return phase
        hook = _HOOK.fullmatch(action)
        if hook is None or hook[2].startswith(_INTERNAL) or hook[1] == "Probe":
            return None
        if hook[2].startswith(("on_validation", "on_sanity")):
            return "validation"
        return "logging" if hook[1] in self._bars else f"{hook[1]}.{hook[2]}"

    def _time_logging(self, trainer: Any) -> None:
        module, on_gpu = trainer.lightning_module, trainer.strategy.root_device.type == "cuda"
        owners: list[tuple[Any, list[str]]] = [(module, ["log", "log_dict"])]
        for logger in trainer.loggers:
            owners.append((logger, [name for name in dir(type(logger)) if name.startswith("log_")] + ["save"]))
            experiment = getattr(logger, "experiment", None)
            names = [name for name in dir(type(experiment)) if name.startswith(("add_", "log"))]
            owners.append((experiment, names))
        owners += [(stream, ["write", "flush"]) for stream in (sys.stdout, sys.stderr)]
        for owner, names in owners:
            for name in names:
                if callable(method := getattr(owner, name, None)):
                    try:
                        self._undo.enter_context(instead_of(owner, name, self._timed(method, on_gpu=on_gpu)))
                    except (AttributeError, TypeError):  # an object without attributes of its own
                        break

    def _timed(self, method: Callable[..., Any], *, on_gpu: bool) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            is_elsewhere = torch.compiler.is_compiling() or threading.get_ident() != self._thread
            if not self.is_on or is_elsewhere or (on_gpu and torch.cuda.is_current_stream_capturing()):
                return method(*args, **kwargs)
            with self.within("logging"):
                return method(*args, **kwargs)

        return timed
