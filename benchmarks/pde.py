r"""What each addition does for a transformer of physics: that of examples/pde.py, at a size for a GPU.

    python benchmarks/pde.py --budget 400 --output benchmarks/results/DATE_pde

The model has 12 blocks, 192 and 384 wide, on fields of 128 x 128 points, 32 of them a batch: 4096 tokens of a field in
windows of 16, and none of the shapes of a language model. `stock` is Lightning as most use it, `bf16-mixed`; `stock,
compiled` compiles the operator by hand. `ours` is what `preset: h100` says; the others add one thing to it. Each case
is a process of its own, twice in turn; steps are timed by the GPU, from the first after warm-up to the last. The last
line is JSON: medians, and each case's ratio to `stock`. What float8 does stands beside what the advisor says of it:

    python -m lightning_ups advise --config examples/pde.yaml --model.dim 192 --model.depth 4 --data.points 128 \
        --data.batch_size 32 --data.trajectories 8

On a CPU all is tiny and nothing is compiled, so that the script can be tried.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import by_kind, left_on_device, main, unloadable
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, RandomSampler
from typing_extensions import override

from lightning_ups.callbacks import AccelerationFlags, ActivationCheckpoint, Compile, DevicePrefetch
from lightning_ups.commands.trial import StepClock
from lightning_ups.precision import BF16Precision, Float8Precision

sys.path.append(str(Path(__file__).parents[1]))
from examples.pde import Forecast, VorticityData

ON_GPU = torch.cuda.is_available()
WARM, STEPS = (40, 60) if ON_GPU else (1, 2)
DIM, DEPTH, POINTS, BATCH = (192, 4, 128, 32) if ON_GPU else (16, 2, 16, 2)
ROUNDS = 2


class Losses(Callback):
    """Keeps them on the device: to read one would wait for it."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(outputs["loss"].detach())


def made() -> tuple[Forecast, DataLoader[Any]]:
    """Return the module, with a rate that does not ask how long the run is, and a loader of pairs drawn at random."""
    seed_everything(0, verbose=False)
    module = Forecast(dim=DIM, depth=DEPTH)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    data = VorticityData(points=POINTS, trajectories=8, frames=9)
    data.setup("fit")
    pairs = data.train_dataloader().dataset
    drawn = RandomSampler(pairs, replacement=True, num_samples=(WARM + STEPS) * BATCH)  # type: ignore[arg-type]
    return module, DataLoader(pairs, batch_size=BATCH, sampler=drawn, pin_memory=ON_GPU)


def trained(*callbacks: Callback, by_hand: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and return how long a step takes."""
    module, data = made()
    if by_hand and ON_GPU:
        module.operator.compile()
    clock, losses = StepClock(warmup=WARM), Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if ON_GPU else "cpu", devices=1, max_epochs=1, callbacks=[*callbacks, clock, losses],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0, num_sanity_val_steps=0, default_root_dir=folder, **options,
        )  # fmt: skip
        with left_on_device(module):
            trainer.fit(module, data)
    return {
        "fields_s": round(BATCH / clock.step_ms * 1e3, 1),
        "step_ms": round(clock.step_ms, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if ON_GPU else None,
        "losses": [round(loss, 5) for loss in torch.stack(losses.found).float().tolist()],
    }


def ours(*callbacks: Callback, precision: Callable[[], Any] = BF16Precision) -> dict[str, Any]:
    """Train with what the preset for this GPU says, and what is added to it."""
    chosen = precision()
    flags = AccelerationFlags(tf32=True, expandable_segments=True, attention="auto") if ON_GPU else AccelerationFlags()
    compiled = [Compile(scope="auto", mode="auto")] if ON_GPU else []
    found = trained(flags, *compiled, *callbacks, plugins=[chosen])
    conversion = getattr(chosen, "conversion", None)
    return found | ({} if conversion is None else {"converted": len(conversion.converted)})


KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "stock": lambda: trained(precision="bf16-mixed"),
    "stock, compiled": lambda: trained(precision="bf16-mixed", by_hand=True),
    "ours": ours,
    "ours, prefetch": lambda: ours(DevicePrefetch()),
    "ours, recomputed": lambda: ours(ActivationCheckpoint(save="matmuls")),
    "ours, float8": lambda: ours(precision=partial(Float8Precision, emulate=not ON_GPU)),
}


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians, spreads and each kind's ratio to ``stock``."""
    found: dict[str, Any] = {}
    speeds = by_kind(results, "fields_s")
    for kind, runs in speeds.items():
        median = statistics.median(runs)
        found[kind] = {"fields_s": median, "spread": round((max(runs) - min(runs)) / median, 4)}
        if "stock" in speeds:
            found[kind]["ratio"] = round(median / statistics.median(speeds["stock"]), 4)
    return found


def unmet(names: Iterable[str]) -> str | None:
    """Say where torchao is missing."""
    wants = [name for name in names if "float8" in name]
    return unloadable("torchao.float8", what=repr(wants[0])) if wants else None


if __name__ == "__main__":
    cases = {f"{kind} {turn}": run for turn in range(1, ROUNDS + 1) for kind, run in KINDS.items()}
    if results := main(cases, columns=("fields_s", "step_ms", "peak_gib", "converted"), timeout_s=150, unmet=unmet):
        print(json.dumps(summary(results)))
