"""Is a run the same, bit for bit, when it is run again, and when it is resumed?

    python benchmarks/same_bits.py --output benchmarks/results/DATE_same_bits

The 1.5 B GPT under FSDP2Strategy on one device. Each way trains three times from one seed: once not saving, once
saving in the background, and once resumed from the second checkpoint. Told are the first step whose loss differs
between the first two, the parameters whose gradients differ in their first step, whether the checkpoint holds what the
run had, and whether the resumed run goes on with its losses. UPS_BENCH_SIZE=tiny tries it all on any machine.
"""

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import left_on_device, main
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.callbacks import Compile
from lightning_ups.models import GPTModule
from lightning_ups.models.gpt import Size
from lightning_ups.strategies import FSDP2Strategy

TINY = os.environ.get("UPS_BENCH_SIZE") == "tiny"
SIZE: Size = "tiny" if TINY else "1B"
SEQ, EVERY, STEPS = (32, 2, 6) if TINY else (2048, 8, 24)
CUDA = torch.cuda.is_available()
BACKEND = "aot_eager" if TINY else "inductor"


class Watch(Callback):
    """Keeps losses, the gradients of the first step, and the state at the second save, or compares what is resumed."""

    def __init__(self, kept: dict[str, Tensor] | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.gradients: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.apart: list[str] = []
        self._kept = kept

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._kept is not None:
            self.apart = _apart(self._kept, _state(trainer))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            found = {name: weight.grad for name, weight in pl_module.named_parameters() if weight.grad is not None}
            self.gradients = {name: _local(gradient).clone() for name, gradient in found.items()}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        self.losses[trainer.global_step] = outputs["loss"].item()
        if trainer.global_step == 2 * EVERY:
            self.state = {name: value.clone() for name, value in _state(trainer).items()}


def same(*, deterministic: bool, compiled: bool) -> dict[str, Any]:
    """Return what differs between three runs of one seed."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    run = partial(_fit, folder, deterministic=deterministic, compiled=compiled)
    try:
        plain, saving = run(), run(save=True)
        resumed = run(ckpt_path=folder / f"step={2 * EVERY}.ckpt", kept=saving.state)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gradients = _apart(plain.gradients, saving.gradients)
    return {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "runs part at step": _first_apart(plain.losses, saving.losses),
        "largest relative difference": _largest(plain.losses, saving.losses),
        "gradients apart": len(gradients),
        "of gradients": len(plain.gradients),
        "which": gradients[:12],
        "state apart": len(resumed.apart),
        "of state": len(saving.state),
        "resumed parts at step": _first_apart(resumed.losses, saving.losses),
        "largest relative difference, resumed": _largest(resumed.losses, saving.losses),
        "losses": [plain.losses, saving.losses, resumed.losses],
    }


def _fit(
    folder: Path, *, deterministic: bool, compiled: bool, save: bool = False, ckpt_path: Path | None = None,
    kept: dict[str, Tensor] | None = None,
) -> Watch:  # fmt: skip
    watch = Watch(kept)
    savers = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)] if save else []
    trainer = Trainer(
        accelerator="cuda" if CUDA else "cpu", devices=1, precision="bf16-mixed", max_steps=STEPS, logger=False,
        strategy=FSDP2Strategy(async_save=save, meta_device=True, initialise_on="device"),
        callbacks=[watch, *savers, *([Compile(backend=BACKEND)] if compiled else [])], enable_checkpointing=save,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, deterministic=deterministic,
    )  # fmt: skip
    torch.manual_seed(0)
    rows: Any = list(torch.randint(256, (256, SEQ + 1)))
    module = GPTModule(size=SIZE, warmup_steps=1, schedule="constant")
    gc.collect()  # what the run before held is not in the way of this one
    with left_on_device(module):
        trainer.fit(module, DataLoader(rows, batch_size=1, shuffle=True), ckpt_path=ckpt_path)
    return watch


def _state(trainer: Trainer) -> dict[str, Tensor]:
    named: dict[Tensor, str] = {weight: name for name, weight in trainer.lightning_module.named_parameters()}
    found = {name: _local(weight) for weight, name in named.items()}
    for optimizer in trainer.optimizers:
        for weight, state in getattr(optimizer, "optimizer", optimizer).state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{key} of {named[weight]}"] = _local(value)
    return found


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [name for name, value in one.items() if name not in other or not torch.equal(value, other[name])]


def _first_apart(one: Mapping[int, float], other: Mapping[int, float]) -> int | None:
    return next((step for step in sorted(one.keys() & other.keys()) if one[step] != other[step]), None)


def _largest(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one.keys() & other.keys())


CASES = {
    "eager": partial(same, deterministic=False, compiled=False),
    "eager, deterministic": partial(same, deterministic=True, compiled=False),
    "compiled": partial(same, deterministic=False, compiled=True),
    "compiled, deterministic": partial(same, deterministic=True, compiled=True),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic=True asks for
    COLUMNS = ("runs part at step", "gradients apart", "of gradients", "state apart", "resumed parts at step")
    main(CASES, columns=COLUMNS, timeout_s=120)
