"""Whether TokenThroughput tells the truth, what it costs, and whether it finds what is wrong.

    python benchmarks/throughput.py --budget 500 --output benchmarks/results/DATE_throughput

`stopwatch` cases compare its rate with a stopwatch that waits for the GPU at both ends of the same steps, and its MFU
with arithmetic by hand. `cost` cases switch it off and on every 20 steps inside one process and report the paired
difference with its interval of 95 %; `look small` compares the steps before the close look with those after it, since
torch's profiler may leave something behind. `trouble` cases inject one trouble each; `first` is what the summary then
names, and `healthy` is the control. `exchange` is between two GPUs, or between two processes of one. On a CPU all sizes
are tiny, so that the script can be tried.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from cases import left_on_device, main
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from processes import free_port
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_ups.callbacks import Compile, TokenThroughput
from lightning_ups.insight.throughput import Summary, checks, first_change, peaks_of, text_table
from lightning_ups.models import GPTModule
from lightning_ups.precision import BF16Precision

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WARM, STEPS = (30, 60) if ON_GPU else (2, 6)
BLOCK, PAIRS = (20, 24) if ON_GPU else (3, 2)
Size = Literal["tiny", "150M", "1B", "8B"]
SHAPES: dict[str, tuple[Size, int, int]] = {  # size, sequence, batch
    "small": ("tiny", 256, 512 if ON_GPU else 2),
    "150M": ("150M" if ON_GPU else "tiny", 1024 if ON_GPU else 32, 32 if ON_GPU else 2),
    "1B": ("1B" if ON_GPU else "tiny", 4096 if ON_GPU else 32, 4 if ON_GPU else 2),
}
KNOWN = dict[str, float]


class Tokens(LightningDataModule):
    """Random tokens that are ready at once, or that a slow loader makes."""

    def __init__(self, *, vocab_size: int, seq: int, batch: int, sleep_s: float = 0.0) -> None:
        super().__init__()
        self._samples = _Samples(vocab_size, seq, batch, sleep_s)

    @override
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self._samples, batch_size=None, pin_memory=ON_GPU)


class _Samples(Dataset[torch.Tensor]):
    def __init__(self, vocab_size: int, seq: int, batch: int, sleep_s: float) -> None:
        self._batches = [torch.randint(vocab_size, (batch, seq + 1)) for _ in range(8)]
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._batches[index % len(self._batches)]


class Waiting(GPTModule):
    """Reads its loss in every training step, and does something with it on the host."""

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1e6:
            raise RuntimeError("the loss has exploded")
        time.sleep(0.02 if ON_GPU else 0.0)  # what a user computes of it
        return loss


def predicted(batch: torch.Tensor) -> int:
    """Count the tokens that are predicted: one fewer in each row than it holds."""
    return batch.shape[0] * (batch.shape[1] - 1)


class Stopwatch(Callback):
    """Waits for the GPU where the first measured step begins, and where the last one has ended."""

    def __init__(self, *, first: int) -> None:
        self.first, self.start, self.seconds = first, 0.0, 0.0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.first:
            self.start = now()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.seconds = now() - self.start


class Toggle(Callback):
    """Times blocks of steps, with the callback on and off in turn; which comes first changes from pair to pair."""

    def __init__(self, throughput: TokenThroughput) -> None:
        self.throughput, self.blocks = throughput, {True: list[float](), False: list[float]()}
        self._on, self._start = True, 0.0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.global_step - WARM
        if done < 0 or done % BLOCK:
            return
        if done:
            self.blocks[self._on].append(now() - self._start)
        block = done // BLOCK
        on = (block % 2 == 0) != ((block // 2) % 2 == 0)  # off, on, on, off, off, on, on, ...
        if on != self._on:
            (self.throughput.resume if on else self.throughput.pause)(trainer)
            self._on = on
        self._start = now()


def now() -> float:
    """Return the time at which the device has done all its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def train(
    shape: str,
    throughput: TokenThroughput,
    *callbacks: Callback,
    steps: int,
    compiled: bool = True,
    module: type[GPTModule] = GPTModule,
    batch: int | None = None,
    seq: int | None = None,
    sleep_s: float = 0.0,
    **options: Any,
) -> tuple[GPTModule, int]:
    """Train random tokens, and return the module and the tokens of a step on one device."""
    seed_everything(0, verbose=False)
    size, default_seq, default_batch = SHAPES[shape]
    seq, batch = seq or default_seq, batch or default_batch
    made = module(size=size, max_seq_len=seq, warmup_steps=2)
    data = Tokens(vocab_size=made.config.vocab_size, seq=seq, batch=batch, sleep_s=sleep_s)
    one: dict[str, Any] = {"devices": 1}
    trainer = Trainer(
        accelerator="gpu" if ON_GPU else "cpu", max_steps=steps,
        plugins=[BF16Precision(weights="masters")] if ON_GPU else [],
        callbacks=[*([Compile(scope="model")] if ON_GPU and compiled else []), *callbacks, throughput], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **one | options,
    )  # fmt: skip
    with left_on_device(made):
        trainer.fit(made, data)
    return made, batch * seq


def measured(**settings: Any) -> TokenThroughput:
    """Return the callback as these cases use it."""
    return TokenThroughput(**{"count": predicted, "unit": "tokens", "table": False, "progress_bar": False} | settings)


def stopwatch(shape: str, *, inspect_at: int | None = None) -> dict[str, Any]:
    """Compare the callback's rate and MFU with a stopwatch and arithmetic."""
    throughput, watch = measured(warmup_steps=WARM, inspect_at=inspect_at), Stopwatch(first=WARM)
    module, tokens = train(shape, throughput, watch, steps=WARM + STEPS)
    summary = found(throughput)
    by_watch = tokens * STEPS / watch.seconds
    assert summary.units_per_s is not None
    result = {
        "tok_s": round(summary.units_per_s),
        "stopwatch_tok_s": round(by_watch),
        "off_by_percent": round(100 * (summary.units_per_s / by_watch - 1), 3),
        "step_ms": round((summary.step_s or 0) * 1e3, 3),
    }
    name = torch.cuda.get_device_name() if ON_GPU else "cpu"
    if (peaks := peaks_of(name)) is not None:
        by_hand = module.config.flops_per_token(SHAPES[shape][1]) * by_watch / (peaks.bf16 * 1e12)
        result |= {"mfu": round(summary.utilisation["mfu"], 4), "mfu_by_hand": round(by_hand, 4)}
    return result


def cost(shape: str) -> dict[str, Any]:
    """Switch the callback off and on, and compare blocks of steps pair by pair."""
    throughput = measured(warmup_steps=WARM, inspect_at=None)
    toggle = Toggle(throughput)
    train(shape, throughput, toggle, steps=WARM + 2 * PAIRS * BLOCK + 1)
    on, off = toggle.blocks[True], toggle.blocks[False]
    differences = [100 * (a - b) / b for a, b in zip(on, off, strict=False)]
    mean, half = interval(differences)
    return {
        "cost_percent": round(mean, 4),
        "interval_percent": [round(mean - half, 4), round(mean + half, 4)],
        "pairs": len(differences),
        "step_ms": round(statistics.median(off) / BLOCK * 1e3, 3),
        "off_s": off,
        "on_s": on,
    }


class Blocks(Callback):
    """Times blocks of steps."""

    def __init__(self) -> None:
        self.seconds, self._start = list[float](), 0.0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.global_step - WARM
        if done < 0 or done % BLOCK:
            return
        if done:
            self.seconds.append(now() - self._start)
        self._start = now()


def residue(shape: str) -> dict[str, Any]:
    """Compare blocks of steps before the close look with blocks after it: what the profiler leaves behind."""
    throughput, blocks = measured(warmup_steps=0, inspect_at=WARM + PAIRS * BLOCK + 2), Blocks()
    train(shape, throughput, blocks, steps=WARM + (2 * PAIRS + 2) * BLOCK + 1)
    before, after = blocks.seconds[:PAIRS], blocks.seconds[PAIRS + 2 :]
    base = statistics.fmean(before)
    mean = 100 * (statistics.fmean(after) / base - 1)
    spread = [100 * statistics.stdev(part) / base / math.sqrt(len(part)) for part in (before, after)]
    half = 2 * math.hypot(*spread)
    return {
        "cost_percent": round(mean, 4),
        "interval_percent": [round(mean - half, 4), round(mean + half, 4)],
        "look_ms": round((max(blocks.seconds[PAIRS : PAIRS + 2]) - base) * 1e3, 1),
        "before_s": before,
        "after_s": after,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half of its interval of 95 %."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    # Student's t for so many pairs, to 1 %: 1.96 + 2.4 / degrees of freedom.
    t = 1.96 + 2.4 / (len(values) - 1)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def trouble(wanted: str | None, **options: Any) -> dict[str, Any]:
    """Train with one trouble, and say what the summary names first."""
    throughput = measured(warmup_steps=10, inspect_at=15)
    train("150M", throughput, steps=45 if ON_GPU else 24, compiled=False, **options)
    summary = found(throughput)
    change = first_change(summary)
    look = summary.inspection
    print(text_table(summary))
    named = None if change is None else change.name
    return {
        "first": named,
        "wanted": wanted,
        "right": named == wanted if wanted else named not in INJECTED,
        "what": None if change is None else change.what,
        "idle": None if look is None else look.idle,
        "exposed": None if look is None else look.exposed_communication,
        "checks": {check.name: check.value for check in checks(summary)},
    }


INJECTED = ("slow loader", "host sync", "slow exchange")


def exchange() -> dict[str, Any]:
    """Let gradients go through sockets in place of NVLink."""
    if not ON_GPU:
        return {"skipped": "needs a GPU"}
    os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
    if torch.cuda.device_count() > 1:
        return trouble("slow exchange", devices=2, strategy="ddp")
    with other_machine():
        return trouble("slow exchange", num_nodes=2, strategy="ddp")


@contextmanager
def other_machine() -> Iterator[None]:
    """Let a second process take part as a machine of its own, with the same GPU: NCCL tells hosts by their names."""
    if "NODE_RANK" in os.environ:
        yield
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "NCCL_HOSTID": "0"}
    told = {**os.environ, "NODE_RANK": "1", "NCCL_HOSTID": "1"}
    command = [sys.executable, __file__, "--case", "trouble exchange"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=told) as other:
        try:
            yield
        finally:
            other.terminate()


def found(throughput: TokenThroughput) -> Summary:
    """Return what was measured."""
    assert throughput.summary is not None
    return throughput.summary


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "stopwatch 150M": partial(stopwatch, "150M"),
    "stopwatch 1B": partial(stopwatch, "1B"),
    "stopwatch small": partial(stopwatch, "small"),
    "cost 150M": partial(cost, "150M"),
    "cost small": partial(cost, "small"),
    "look small": partial(residue, "small"),
    "healthy": partial(trouble, None),
    "trouble loader": partial(trouble, "slow loader", sleep_s=0.3 if ON_GPU else 0.02),
    "trouble batch": partial(trouble, "batch too small", batch=1, seq=128 if ON_GPU else 16),
    "trouble sync": partial(trouble, "host sync", module=Waiting),
    "trouble exchange": exchange,
}

if __name__ == "__main__":
    columns = ("tok_s", "off_by_percent", "mfu", "mfu_by_hand", "cost_percent", "interval_percent", "first", "right")
    main(CASES, columns=columns, timeout_s=240)
