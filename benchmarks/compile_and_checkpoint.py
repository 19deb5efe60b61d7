"""What Compile and ActivationCheckpoint do to the 1.5 B GPT: graphs, losses, bytes, FLOPs, memory, speed.

    python benchmarks/compile_and_checkpoint.py --output benchmarks/results/DATE_compile_and_checkpoint

Every case trains the same weights on the same batches through a stock Trainer. Bytes saved for backward and FLOPs in
backward are counted apart from the timing, on one eager step. `UPS_BENCH_SIZE=tiny` tries it all on any machine.
"""

import gc
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import left_on_device, main
from lightning.pytorch import Callback, Trainer, seed_everything
from typing_extensions import override

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.data import RandomTokens
from lightning_ups.insight.throughput import count_flops
from lightning_ups.models import GPT, SIZES, GPTModule
from lightning_ups.models.gpt import Size
from lightning_ups.precision import BF16Precision
from lightning_ups.transforms.recompute import recompute

TINY = os.environ.get("UPS_BENCH_SIZE") == "tiny"
SIZE: Size = "tiny" if TINY else "1B"
SEQ, BATCH, STEPS, WARM = (32, 2, 8, 3) if TINY else (4096, 4, 20, 8)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "aot_eager" if TINY else "inductor"
CHECKPOINTS = {
    "nothing": {"save": "nothing"},
    "matmuls": {"save": "matmuls"},
    "mm only": {"save": ["aten.mm"]},
    "nothing, every 2nd": {"save": "nothing", "every_k": 2},
}


class Clock(Callback):
    """Times whole steps by events, read after the last one, and keeps the losses on the device."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.losses: list[torch.Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())
        if DEVICE == "cuda":
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def figures(self) -> dict[str, Any]:
        """Return losses, the median time of a step, tokens a second and the peak of memory."""
        losses = [loss.item() for loss in self.losses]
        found: dict[str, Any] = {"losses": losses, "loss_first": losses[0], "loss_last": losses[-1]}
        if DEVICE == "cuda":
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            times = [a.elapsed_time(b) for a, b in zip(self.events[WARM:], self.events[WARM + 1 :], strict=False)]
            if times:
                found["step_ms"] = round(statistics.median(times), 2)
                found["tok_s"] = round(BATCH * SEQ / statistics.median(times) * 1e3)
        return found


def train(
    *callbacks: Callback, steps: int = STEPS, save: Path | None = None, load: Path | None = None
) -> dict[str, Any]:
    """Train the same weights on the same batches, with ``callbacks``; say what the clock and the report say."""
    seed_everything(0, verbose=False)
    module, clock = GPTModule(size=SIZE, lr=3e-4, warmup_steps=2, max_seq_len=SEQ), Clock()
    with torch.device(DEVICE):  # where drawing takes no time
        module.configure_model()
    data = RandomTokens(vocab_size=256 if TINY else 128256, seq_len=SEQ, batch_size=BATCH)
    trainer = Trainer(
        accelerator=DEVICE.replace("cuda", "gpu"), devices=1, max_steps=steps,
        plugins=[BF16Precision(weights="masters")],
        callbacks=[*callbacks, clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, limit_val_batches=0,
    )  # fmt: skip
    report: dict[str, Any] = {}
    clock.on_train_end = lambda *_: report.update(_report(trainer))  # type: ignore[method-assign]
    if load:
        module.load_state_dict(torch.load(load, mmap=True)["state_dict"])
    with left_on_device(module):
        trainer.fit(module, data)
    if save:
        trainer.save_checkpoint(save, weights_only=True)
    figures = {**clock.figures(), "report": report}
    gc.collect()  # what one training held is not in the next one's way
    return figures


def _report(trainer: Trainer) -> dict[str, Any]:
    from lightning_ups.order import applied

    context = applied(trainer.strategy)
    return context.report.parts if context else {}


def case(*make: Any) -> dict[str, Any]:
    """Train once, and count bytes and FLOPs of one eager step with the same checkpointing."""
    callbacks = [part() for part in make]
    figures = train(*callbacks)
    checkpoint = next((c for c in callbacks if isinstance(c, ActivationCheckpoint)), None)
    return {**figures, **counted(checkpoint)}


def counted(checkpoint: ActivationCheckpoint | None) -> dict[str, Any]:
    """Count what one eager step of one sequence saves for backward, and the FLOPs of its backward."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    with torch.device(DEVICE):
        model = GPT(SIZES[SIZE]).to(torch.bfloat16)
        tokens = torch.randint(model.config.vocab_size, (1, SEQ + 1))
    blocks = list(model.layers)[:: checkpoint.every_k] if checkpoint else []
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, torch.UntypedStorage]] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with recompute(blocks, save=checkpoint.save if checkpoint else "nothing") as kept:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        # Selective checkpointing keeps what it saves in a store of its own, which the hooks above do not see.
        arguments = len(blocks) * tokens[:, 1:].numel() * model.config.dim * 2
        saved = sum(size for size, _ in seen.values()) + max(kept.bytes_kept - arguments, 0)
        flops = count_flops(loss.backward)
    return {"saved_gib": round(saved / 2**30, 3), "backward_tflop": round(flops.total / 1e12, 3)}


def interchange() -> dict[str, Any]:
    """Train 3 steps, save the weights, and go on for 3, each part compiled or eager: all four tell the same losses."""
    make = {"compiled": lambda: [Compile(backend=BACKEND)], "eager": list}
    found = {}
    memory = Path("/dev/shm")  # six gigabytes, twice: a disk may take longer than the training
    with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as folder:
        for first in make:
            path = Path(folder) / f"{first}.ckpt"
            before = train(*make[first](), steps=3, save=path)["losses"]
            for second in make:
                found[f"{first}, then {second}"] = [*before, *train(*make[second](), steps=3, load=path)["losses"]]
            path.unlink()
    base = found["eager, then eager"]
    worst = max(abs(a - b) / b for run in found.values() for a, b in zip(run, base, strict=True))
    return {**found, "worst_relative": worst}


CASES: dict[str, Any] = {
    "eager": lambda: case(),
    "compile": lambda: case(lambda: Compile(backend=BACKEND)),
    **{
        f"compile + {name}": lambda options=options: case(
            lambda: Compile(backend=BACKEND), lambda: ActivationCheckpoint(**options)
        )
        for name, options in CHECKPOINTS.items()
    },
    "compile + budget 0.5": lambda: train(Compile(backend=BACKEND), ActivationCheckpoint(memory_budget=0.5)),
    "eager + nothing": lambda: case(lambda: ActivationCheckpoint(save="nothing")),
    "eager + matmuls": lambda: case(lambda: ActivationCheckpoint(save="matmuls")),
    "compile model": lambda: case(lambda: Compile(backend=BACKEND, scope="model")),
    "interchange": interchange,
}

if __name__ == "__main__":
    if DEVICE == "cpu" and not TINY:
        raise SystemExit("There is no GPU for the 1.5 B GPT. Set UPS_BENCH_SIZE=tiny to try the script out.")
    columns = ("tok_s", "peak_gib", "saved_gib", "backward_tflop", "loss_first", "loss_last", "worst_relative")
    main(CASES, columns=columns, timeout_s=200)
