"""What float8 loses of the gradients that linear layers get, with one scale for a tensor, by its format.

    python benchmarks/float8_gradients.py --cases quickstart --output DIR     # anywhere, in two minutes
    python benchmarks/float8_gradients.py --cases 1B --output DIR             # on a GPU

A GPT trains on the standard library's source in bfloat16 with float32 masters, and at some steps the gradient of each
layer's output, in the blocks, is rounded beside it: `error` is the norm of what rounding changes, over the gradient's,
and `zeros` the share of the values other than zero that become zero. `peak` is the largest magnitude over the root mean
square. Of each stands the median over layers and steps, and the largest with the name of its layer.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from cases import left_on_device, main, unmet_gpus
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from lightning_ups.data import StdlibText
from lightning_ups.insight.verify import rounded
from lightning_ups.models import GPTModule
from lightning_ups.models.gpt import Size
from lightning_ups.precision import BF16Precision

ON_GPU = torch.cuda.is_available()
FORMATS: Mapping[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
STEPS = 300
LOOKED_AT = (1, 20, 100, 200, STEPS - 1)


def losses_of(gradient: Tensor) -> dict[str, float]:
    """Return what each format loses of a gradient."""
    values = gradient.detach().float()
    norm, count = values.norm(), (values != 0).sum()
    found = {"peak": values.abs().max() / values.square().mean().sqrt()}
    for name, dtype in FORMATS.items():
        held = rounded(values, per="tensor", dtype=dtype)
        found[f"{name} error"] = (held - values).norm() / norm
        found[f"{name} zeros"] = ((held == 0) & (values != 0)).sum() / count
    return {name: value.item() for name, value in found.items()}


class Look(Callback):
    """Rounds what linear layers in the blocks get, at some steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps, self.looks = steps, False
        self.found: dict[str, dict[str, float]] = {}

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for name, layer in pl_module.named_modules():
            if isinstance(layer, nn.Linear) and ".layers." in name:
                layer.register_full_backward_hook(partial(self._see, name, trainer))

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.looks = trainer.global_step in self.steps

    def _see(self, name: str, trainer: Any, _: nn.Module, __: Any, gradients: Any) -> None:
        if self.looks:
            self.found[f"{name}, step {trainer.global_step}"] = losses_of(gradients[0])


def gradients(size: Size, *, seq: int, batch: int, steps: int = STEPS) -> dict[str, Any]:
    """Return what is lost in a training."""
    seed_everything(0, verbose=False)
    look = Look([step for step in LOOKED_AT if step < steps])
    module = GPTModule(size=size, vocab_size=256, max_seq_len=seq, warmup_steps=steps // 10)
    trainer = Trainer(
        accelerator="cuda" if ON_GPU else "cpu", devices=1, max_steps=steps, plugins=[BF16Precision(weights="masters")],
        callbacks=[look], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    with left_on_device(module):
        trainer.fit(module, StdlibText(seq_len=seq, batch_size=batch))
    found: dict[str, Any] = {"looked at": len(look.found)}
    for what in next(iter(look.found.values())):
        values = {name: losses[what] for name, losses in look.found.items()}
        most = max(values, key=lambda name: values[name])
        found[what] = float(f"{statistics.median(values.values()):.3g}")
        found[f"most {what}"] = {"is": float(f"{values[most]:.3g}"), "of": most}
    return found


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "quickstart": partial(gradients, "tiny", seq=256, batch=8),
    "1B": partial(gradients, "1B", seq=1024, batch=8),
    "few": partial(gradients, "tiny", seq=32, batch=2, steps=3),
}


def unmet(cases: Sequence[str]) -> str | None:
    """Return what is not there for these cases."""
    return unmet_gpus(1, what="'1B'") if "1B" in cases else None


if __name__ == "__main__":
    main(CASES, columns=("looked at", "peak", "e4m3 error", "e5m2 error", "e4m3 zeros", "e5m2 zeros"), unmet=unmet)
