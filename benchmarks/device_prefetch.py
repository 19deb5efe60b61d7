"""What copying the next batch beside the step before saves, for batches of 64 MiB and of 1 MiB.

    python benchmarks/device_prefetch.py --budget 400 --output benchmarks/results/DATE_device_prefetch

`ready` batches lie in pinned memory, and nothing in a step waits for the GPU. `workers` come from two worker processes
through shared memory, and every step reads its loss at its end, as many do. Each case is a process that trains without
`DevicePrefetch` and with it, in turn, three times, on the same products of matrices; times are of steps between two
waits for the GPU, after warm-up. `copy_ms` is one copy alone, `hidden` the part of it that the step has become shorter
by. Losses of all six runs must be equal, bit for bit. A 64 MiB batch needs 400 MiB of /dev/shm for its workers.

On a CPU, where there is nothing to copy, all sizes are tiny, so that the script can be tried.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal

import torch
from cases import main
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_ups.callbacks import DevicePrefetch

ON_GPU = torch.cuda.is_available()
WARM, STEPS, ROUNDS = (10, 50, 3) if ON_GPU else (1, 3, 2)
WIDTH = 4096 if ON_GPU else 16
UNIT = 2**20 if ON_GPU else 2**10
Loader = Literal["ready", "workers"]


class Products(LightningModule):
    """Some products of matrices, whose time does not depend on the batch."""

    start: Tensor

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("start", torch.randn(WIDTH, WIDTH))
        self.reads, self.losses = reads, list[Tensor]()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.start
        for _ in range(4):
            x = self.weight @ x
        loss = x.square().mean() + self.weight.mean() * batch.mean()
        self.losses.append(loss.detach())
        return loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads:
            self.losses[-1].item()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Batches(Dataset[Tensor]):
    """Some batches, again and again."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        made = [torch.full((num_bytes // 4,), n / 7) for n in range(4)]
        self._batches = [batch.pin_memory() for batch in made] if pinned and ON_GPU else made

    def __len__(self) -> int:
        return WARM + STEPS + 1

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index % len(self._batches)]


class Clock(Callback):
    """Notes when ``steps`` steps begin and end that follow the first ``warm``."""

    def __init__(self, *, warm: int, steps: int) -> None:
        self._ends = warm, warm + steps
        self.times: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self._ends:
            self.times.append(now())


def now() -> float:
    """Return the time at which the device has done all its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(num_bytes: int, loader: Loader, *callbacks: Callback) -> dict[str, Any]:
    """Train once."""
    if loader == "ready":
        data = DataLoader(Batches(num_bytes, pinned=True), batch_size=None)
    else:
        data = DataLoader(Batches(num_bytes, pinned=False), batch_size=None, num_workers=2, pin_memory=ON_GPU)
    torch.manual_seed(0)
    module, clock = Products(reads=loader == "workers"), Clock(warm=WARM, steps=STEPS)
    if ON_GPU:
        gc.collect()  # what the run before held would count as this one's
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if ON_GPU else "cpu", devices=1, max_epochs=1, callbacks=[*callbacks, clock],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, data)
    start, end = clock.times
    return {
        "step_ms": (end - start) / STEPS * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0,
        "losses": torch.stack(module.losses).tolist(),
    }


def copy_ms(num_bytes: int) -> float:
    """Return the time of one copy from pinned memory, alone."""
    if not ON_GPU:
        return 0.0
    source = torch.empty(num_bytes // 4).pin_memory()
    target = torch.empty_like(source, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        for _ in range(10):
            target.copy_(source, non_blocking=True)
        event.record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 10


def compared(size: int, loader: Loader) -> dict[str, Any]:
    """Train without and with the callback in turn, and compare."""
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "prefetch": []}
    for _ in range(ROUNDS):
        runs["plain"].append(trained(size * UNIT, loader))
        runs["prefetch"].append(trained(size * UNIT, loader, DevicePrefetch(min_kb=64 if ON_GPU else 0)))
    every = [run for kind in runs.values() for run in kind]
    plain, ours = (statistics.median(run["step_ms"] for run in runs[kind]) for kind in ("plain", "prefetch"))
    copy = copy_ms(size * UNIT)
    return {
        "plain_ms": round(plain, 3),
        "prefetch_ms": round(ours, 3),
        "ratio": round(plain / ours, 4),
        "copy_ms": round(copy, 3),
        "hidden": round((plain - ours) / copy, 2) if copy else None,
        "losses_equal": all(run["losses"] == every[0]["losses"] for run in every),
        "peak_gib": [round(max(run["peak_gib"] for run in runs[kind]), 3) for kind in runs],
        "steps_ms": {kind: [round(run["step_ms"], 3) for run in runs[kind]] for kind in runs},
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    f"{size} MiB, {loader}": partial(compared, size, loader) for loader in ("ready", "workers") for size in (64, 1)
}


def unmet(names: Sequence[str]) -> str | None:
    """Say where there is too little shared memory for the workers' batches."""
    shared = Path("/dev/shm")
    if ON_GPU and "64 MiB, workers" in names and shared.exists() and disk_usage(shared).free < 400 * 2**20:
        free = disk_usage(shared).free // 2**20
        return f"'64 MiB, workers' needs 400 MiB of /dev/shm, which has {free}: enlarge it, or leave that case out"
    return None


if __name__ == "__main__":
    columns = ("plain_ms", "prefetch_ms", "ratio", "copy_ms", "hidden", "losses_equal", "peak_gib")
    main(CASES, columns=columns, timeout_s=100, unmet=unmet)
