"""What offloading and low-bit state do to the 8 B GPT on one GPU: memory, speed, and the largest model that trains.

    python benchmarks/offload.py --output benchmarks/results/DATE_offload
    python benchmarks/offload.py --cases "largest plain" "largest together" --output ...

Every case trains float32 masters, or what it says, at 128 Ki tokens for each optimizer step (`UPS_BENCH_TOKENS`), in a
process of its own, and is printed and kept when it is done; `--budget` seconds are for all of them. An out-of-memory
error is a result: `forensics` is what `MemoryForensics` says of it. A search for the largest model says what each trial
found, and one that time ends has the largest that was found until then. `UPS_BENCH_SIZE=tiny` tries it all on any
machine.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from cases import left_on_device, main, unloadable, unmet_gpus
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins import Precision
from processes import result_of
from typing_extensions import override

from lightning_ups.callbacks import (
    ActivationCheckpoint,
    ActivationOffload,
    Compile,
    MemoryForensics,
    OptimizerOffload,
)
from lightning_ups.data import RandomTokens
from lightning_ups.models import SIZES, GPTModule
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision

if TYPE_CHECKING:
    from lightning_ups.models.gpt import Size

SIZE = os.environ.get("UPS_BENCH_SIZE", "8B")
TINY = SIZE == "tiny"
SEQ = 32 if TINY else 4096
TOKENS = int(os.environ.get("UPS_BENCH_TOKENS", 256 if TINY else 2**17))
STEPS, WARM = 3, 1  # a step of 128 Ki tokens takes longer than ten seconds
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "aot_eager" if TINY else "inductor"
HOST_GB = float(os.environ.get("UPS_BENCH_HOST_GB", "105"))  # of 120: Python, buffers and the batch want some
LIMIT_S = 150  # for a trial of the search
SAYS = "OFFLOAD_SAYS"  # where a search says what it finds: cases run with their output put aside


MASTERS = partial(BF16Precision, weights="masters")


@dataclass(frozen=True)
class Case:
    """What a run is made of.

    Args:
        callbacks: Made for each run.
        bits: Of each number of the optimizer's state.
        precision: Made for each run.
        batch: Sequences of a microbatch.
    """

    callbacks: tuple[Callable[[], Callback], ...] = ()
    bits: int = 32
    precision: Callable[[], Precision] = MASTERS
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CHECKPOINT = partial(ActivationCheckpoint, save="nothing")
ACTIVATIONS = partial(ActivationOffload, min_mb=0.0 if TINY else 1.0)
OPTIMIZER = partial(OptimizerOffload, chunk_mb=0.05 if TINY else 256)
SPEED = {
    "plain": Case(),
    "checkpointing": Case((CHECKPOINT,)),
    "optimizer offload, checkpointing": Case((OPTIMIZER, CHECKPOINT)),
    "optimizer offload": Case((OPTIMIZER,)),
    "activation offload": Case((ACTIVATIONS,)),
    "8-bit, checkpointing": Case((CHECKPOINT,), bits=8),
    "together": Case((OPTIMIZER, CHECKPOINT, ACTIVATIONS), batch=4),
    "update on the CPU, checkpointing": Case((partial(OPTIMIZER, update="host"), CHECKPOINT)),
    "optimizer offload, a quarter stays, checkpointing": Case((partial(OPTIMIZER, resident=0.25), CHECKPOINT)),
    "8-bit, no masters, checkpointing": Case((CHECKPOINT,), bits=8, precision=BF16WeightsPrecision),
    "together, 8-bit": Case((OPTIMIZER, CHECKPOINT, ACTIVATIONS), bits=8, batch=4),
}
LARGEST = {"plain": 34, "checkpointing": 36, "together": 66, "together, 8-bit": 104}  # blocks, where a search begins


class Module(GPTModule):
    """The GPT with another number of blocks, and with state in eight bits where that is asked for."""

    def __init__(self, *, bits: int, rounds: bool, layers: int | None) -> None:
        super().__init__(size=cast("Size", SIZE), lr=3e-4, warmup_steps=2, max_seq_len=SEQ, loss="chunked")
        self.bits, self.rounds = bits, rounds
        if layers is not None:
            self.config = replace(self.config, num_layers=layers)

    @override
    def configure_optimizers(self) -> Any:
        if self.bits == 32:
            return super().configure_optimizers()
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=self.lr, weight_decay=0.1, bf16_stochastic_round=self.rounds)


class Clock(Callback):
    """Times optimizer steps, each a whole accumulation, by the clock after the device is done."""

    def __init__(self, *, tokens: int) -> None:
        self.tokens = tokens
        self.times: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._now()

    def _now(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.monotonic())

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._now()
            self.losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        context = applied(trainer.strategy)
        self.state = _state(trainer, context.report.parts if context else {})

    def figures(self) -> dict[str, Any]:
        """Return losses, the time of a step, tokens a second, and memory."""
        steps = [b - a for a, b in zip(self.times[WARM:], self.times[WARM + 1 :], strict=False)]
        found: dict[str, Any] = {"losses": [round(loss.item(), 5) for loss in self.losses], **self.state}
        found["host_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        found.update(_peak())
        if steps:
            found["first_step_s"] = round(self.times[1] - self.times[0], 2)
            found["step_s"] = round(statistics.median(steps), 3)
            found["tok_s"] = round(self.tokens / statistics.median(steps))
        return found


def _peak() -> dict[str, float]:
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if DEVICE == "cuda" else {}


def _state(trainer: Trainer, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of optimizer state and masters, and how many of them are on the device."""
    if offload := parts.get("OptimizerOffload"):
        host, device = offload["host_bytes"], offload["device_bytes"]
    else:
        optimizer, host = trainer.strategy.optimizers[0], 0
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        masters = getattr(optimizer, "masters", None)
        device = sum(map(_nbytes, tensors)) + (4 * sum(p.numel() for p in masters.of) if masters is not None else 0)
    moved = parts.get("ActivationOffload", {}).get("moved_bytes", 0)
    return {
        "state_on_device_gib": round(device / 2**30, 3),
        "state_on_host_gib": round(host / 2**30, 3),
        "activations_moved_gib": round(moved / 2**30, 3),
    }


def _nbytes(tensor: torch.Tensor) -> int:
    codes = getattr(tensor, "codes", None)
    return tensor.nbytes if codes is None else codes.nbytes + tensor.scale.nbytes  # type: ignore[attr-defined]


def measured(case: Case) -> dict[str, Any]:
    """Train with ``case``; where memory runs out, that is what came of it, and what the forensics say."""
    forensics = MemoryForensics(folder=tempfile.mkdtemp(), snapshot=False)
    try:
        return run(replace(case, callbacks=(*case.callbacks, lambda: forensics)))
    except Exception as error:
        if forensics.text is None:  # it knows an out-of-memory error, of whatever class
            raise
        return {"error": f"out of memory: {type(error).__name__}", "forensics": forensics.text.splitlines(), **_peak()}


def run(case: Case, *, layers: int | None = None, steps: int = STEPS, tokens: int = TOKENS) -> dict[str, Any]:
    """Train ``steps`` optimizer steps."""
    seed_everything(0, verbose=False)
    torch.set_float32_matmul_precision("high")
    clock = Clock(tokens=tokens)
    module = Module(bits=case.bits, rounds=case.precision is BF16WeightsPrecision, layers=layers)
    batch = min(case.batch, tokens // SEQ)
    trainer = Trainer(
        accelerator=DEVICE.replace("cuda", "gpu"), devices=1, max_steps=steps, plugins=[case.precision()],
        callbacks=[Compile(backend=BACKEND, scope="blocks"), *(make() for make in case.callbacks), clock],
        accumulate_grad_batches=tokens // (SEQ * batch), gradient_clip_val=1.0, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.monotonic()
    with left_on_device(module):
        trainer.fit(module, RandomTokens(vocab_size=module.config.vocab_size, seq_len=SEQ, batch_size=batch))
    around = {"begins_s": round(clock.times[0] - began, 1), "ends_s": round(time.monotonic() - clock.times[-1], 1)}
    return {"parameters": sum(p.numel() for p in module.parameters()), "batch": batch, **clock.figures(), **around}


def fits(name: str, layers: int) -> dict[str, Any]:
    """Make two optimizer steps of one sequence with ``layers`` blocks: whoever cannot ends with an error."""
    case = replace(SPEED[name], batch=1)
    callbacks = [_with_room(make, name, layers) for make in case.callbacks]
    return {"layers": layers, **run(replace(case, callbacks=tuple(callbacks)), layers=layers, steps=2, tokens=SEQ)}


def _with_room(make: Callable[[], Callback], name: str, layers: int) -> Callable[[], Callback]:
    if not isinstance(make, partial) or make.func is not OptimizerOffload:
        return make
    config = Module(bits=32, rounds=False, layers=layers).config
    with torch.device("meta"):
        from lightning_ups.models import GPT

        numel = sum(p.numel() for p in GPT(config).parameters())
    state = numel * (12 if SPEED[name].bits == 32 else 6.1)
    return partial(make, resident=round(max(0.0, 1 - HOST_GB * 1e9 / state), 3))  # what the host has no room for


def largest(name: str) -> dict[str, Any]:
    """Search for the most blocks that fit, each trial in a process of its own."""
    low, high, layers, stride = 1, 4 if TINY else 200, 3 if TINY else LARGEST[name], 1
    best: dict[str, Any] = {}
    tried: dict[int, str] = {}
    while low <= high:
        layers = min(max(layers, low), high)
        began = time.monotonic()
        found = _trial(f"fits {name} {layers}")
        tried[layers] = found.get("error", "")[-200:] or "fits"
        if "error" in found:
            high = layers - 1
        else:
            best, low = found, layers + 1
        if best and len(tried) > list(tried.values()).count("fits"):  # the largest is between two that were tried
            layers = (low + high + 1) // 2
        else:
            layers, stride = layers + (stride if best else -stride), 2 * stride
        _say(f"largest {name}: {[*tried][-1]} blocks in {time.monotonic() - began:.0f} s: {[*tried.values()][-1]}")
        # The last line of this kind counts, if this process is ended: then it is what was found until now.
        print("\nRESULT " + json.dumps({**best, "tried": tried, "left": [low, high]}), flush=True)
    return {**best, "tried": tried}


def _say(line: str) -> None:
    with suppress(OSError), open(os.environ.get(SAYS, os.devnull), "a") as output:
        print(line, file=output)


def _trial(name: str) -> dict[str, Any]:
    # In this session, and not in one of its own: who ends the search ends its trial.
    command = [sys.executable, __file__, "--case", name]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {LIMIT_S} s"}
    return result_of(done.stdout)


class Cases(dict[str, Callable[[], dict[str, Any]]]):
    """The cases, and each trial of a search under a name that says what it tries."""

    def __missing__(self, name: str) -> Callable[[], dict[str, Any]]:
        kind, _, layers = name.removeprefix("fits ").rpartition(" ")
        return partial(fits, kind, int(layers))


CASES = Cases({name: partial(measured, case) for name, case in SPEED.items()})
SEARCHES = {f"largest {name}": partial(largest, name) for name in LARGEST}


def unmet(names: Sequence[str]) -> str | None:
    """Say what the cases ``names`` need and is not there."""
    if SIZE not in SIZES:
        return f"UPS_BENCH_SIZE={SIZE} is not a size: choose one of {', '.join(SIZES)}"
    if not TINY and (lacks := unmet_gpus(1, what=f"the {SIZE} GPT")):
        return f"{lacks}: UPS_BENCH_SIZE=tiny tries it all on any machine"
    chosen = {name: SPEED[name.removeprefix("largest ")] for name in names if name.removeprefix("largest ") in SPEED}
    for name, case in chosen.items():
        batch = max(min(case.batch, TOKENS // SEQ), 1)
        if TOKENS % (SEQ * batch):
            return f"UPS_BENCH_TOKENS={TOKENS} are not whole microbatches of {batch} x {SEQ} tokens, as {name!r} has"
    if any(case.bits == 8 for case in chosen.values()) and (lacks := unloadable("torchao.optim", what="8-bit state")):
        return f"{lacks}: choose other --cases"
    offloads = any(
        isinstance(make, partial) and make.func is OptimizerOffload for c in chosen.values() for make in c.callbacks
    )
    if offloads and not TINY and (free := _host_gb()) is not None and free < HOST_GB:
        return f"offloading may take {HOST_GB:.0f} GB of the host, which has {free:.0f} free: set UPS_BENCH_HOST_GB"
    return None


def _host_gb(*, meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the free memory of the host, or of what this container may use of it."""
    free = None
    with suppress(OSError, KeyError):
        free = _figures(meminfo)["MemAvailable:"] * 1024 / 1e9
    with suppress(OSError, ValueError, KeyError):  # "max" is no number
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = _figures(group / "memory.stat")
        files = stat["active_file"] + stat["inactive_file"]  # cached, and given up when it is needed
        free = min(free or math.inf, (limit - used + files) / 1e9)
    return free


def _figures(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


COLUMNS = ("tok_s", "step_s", "peak_gib", "state_on_device_gib", "state_on_host_gib", "parameters")

if __name__ == "__main__":
    os.environ.setdefault(SAYS, f"/proc/{os.getpid()}/fd/1")
    searching = any(argument.startswith("largest") for argument in sys.argv)
    if searching:
        CASES.update(SEARCHES)
    main(CASES, columns=COLUMNS, timeout_s=560 if searching else 240, unmet=unmet)
