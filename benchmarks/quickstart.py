"""The quickstart's speed through the Trainer, beside a bare compiled loop over the same model.

    python benchmarks/quickstart.py --output benchmarks/results/DATE_quickstart

`trainer` runs examples/quickstart.yaml by the command line's own code: its preset, loggers, progress bar, callbacks and
data. `bare` is what one would write by hand for the same model, optimizer, precision and shapes: the whole model
compiled, batches already on the device, no schedule, no logging. `trainer, graphs` is `trainer` with CUDA graphs.
Each case is a process of its own, in turn, three rounds. Compilation and warm-up are not timed: on a GPU the latter is
eight seconds of training, since Inductor starts its processes beside the first steps. The timed steps are waited for at
their ends only, and what would come after them (validation, the sample) is left out.

On a CPU nothing is compiled, and UPS_BENCH_STEPS=4 tries it all out. The last line is JSON: the ratios of the medians.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from cases import by_kind, main
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_ups.callbacks import Compile, TextSample, UnigramBaseline
from lightning_ups.cli import UpsCLI
from lightning_ups.models.optimizer import adamw

CONFIG = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
STEPS = int(os.environ.get("UPS_BENCH_STEPS", "300" if torch.cuda.is_available() else "20"))
WARM, WARM_S = (60, 8.0) if torch.cuda.is_available() else (2, 0.0)
MOST_STEPS = 100_000
ROUNDS = 3


class Stopwatch:
    """Times STEPS steps after WARM of them and WARM_S seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._began: float | None = None
        self._first = 0

    def begin_step(self, step: int) -> bool:
        """Take it that ``step`` begins; return whether all is timed."""
        self._began = self._began or time.perf_counter()
        if not self.times:
            if step >= WARM and time.perf_counter() - self._began >= WARM_S:
                self.times, self._first = [now()], step
        elif step == self._first + STEPS:
            self.times.append(now())
        return len(self.times) == 2


class Clock(Callback):
    """Times the Trainer's steps, from the start of one to the start of another, and ends the run."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.shape: torch.Size | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shape = batch.shape
        trainer.should_stop = self.watch.begin_step(trainer.global_step)


class Prepared(UpsCLI):
    """Makes everything that the quickstart consists of; with ``run``, runs it too."""

    def __init__(self, folder: str, *callbacks: Callback, run: bool, graphs: bool = False) -> None:
        self._added, self._run, self._graphs = callbacks, run, graphs
        words = {
            "config": CONFIG,
            "trainer.max_steps": MOST_STEPS,
            "trainer.val_check_interval": MOST_STEPS,
            "trainer.limit_val_batches": 0,
            "trainer.default_root_dir": folder,
        }
        super().__init__(args=["fit", *(f"--{name}={value}" for name, value in words.items())])

    @override
    def after_instantiate_classes(self) -> None:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if self._graphs:
            graphed = Compile(scope="auto", mode="reduce-overhead")
            callbacks[:] = [graphed if isinstance(c, Compile) else c for c in callbacks]
        callbacks[:] = [c for c in callbacks if not isinstance(c, (TextSample, UnigramBaseline, ModelCheckpoint))]
        callbacks.extend(self._added)
        if not self._run:
            self.subcommand = None


def through_trainer(*, graphs: bool = False) -> dict[str, Any]:
    """Time the quickstart as it is."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        Prepared(folder, clock, run=True, graphs=graphs)
        return figures(clock.watch.times, clock.shape)


def bare() -> dict[str, Any]:
    """Time a loop by hand over the same model and shapes."""
    with tempfile.TemporaryDirectory() as folder:
        made = Prepared(folder, run=False)
        module, device = made.model, made.trainer.strategy.root_device
        module.configure_model()
        module.to(device)
        batches = cycle(some_batches(made, device, count=16))
        optimizer = adamw(module, lr=module.lr, betas=module.betas, weight_decay=module.weight_decay)
        on_gpu = device.type == "cuda"
        model = torch.compile(module.model) if on_gpu else module.model
        watch, batch = Stopwatch(), next(batches)
        for step, batch in enumerate(batches):
            if watch.begin_step(step):
                break
            with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext():
                loss = model(batch[:, :-1].long(), batch[:, 1:].long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return figures(watch.times, batch.shape)


def some_batches(made: UpsCLI, device: torch.device, *, count: int) -> list[torch.Tensor]:
    """Return the first batches of the datamodule, on the device."""
    made.datamodule.trainer = made.trainer  # which the batch size depends on
    made.datamodule.setup("fit")
    return [batch.to(device) for batch in islice(made.datamodule.train_dataloader(), count)]


def now() -> float:
    """Return the time at which the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def figures(times: Iterable[float], shape: torch.Size | None) -> dict[str, Any]:
    """Return the speed between the two ``times`` with batches of ``shape`` [batch, seq + 1]."""
    assert shape is not None
    start, end = times
    tokens = shape[0] * (shape[1] - 1)
    return {
        "tok_s": round(STEPS * tokens / (end - start)),
        "step_ms": round((end - start) / STEPS * 1e3, 3),
        "tokens_a_step": tokens,
        "steps": STEPS,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }


KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "bare": bare,
    "trainer": through_trainer,
    "trainer, graphs": lambda: through_trainer(graphs=True),
}


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians, spreads and each kind's ratio to ``bare``."""
    found: dict[str, Any] = {
        kind: {
            "median_tok_s": statistics.median(runs),
            "spread": round((max(runs) - min(runs)) / statistics.median(runs), 4),
            "runs": runs,
        }
        for kind, runs in by_kind(results, "tok_s").items()
    }
    for kind in found.keys() - {"bare"} if "bare" in found else ():
        found[kind]["ratio_to_bare"] = round(found[kind]["median_tok_s"] / found["bare"]["median_tok_s"], 4)
    return found


if __name__ == "__main__":
    cases = {f"{kind} {turn}": case for turn in range(1, ROUNDS + 1) for kind, case in KINDS.items()}
    if results := main(cases, columns=("tok_s", "step_ms", "tokens_a_step", "peak_gib")):
        print(json.dumps(summary(results)))
