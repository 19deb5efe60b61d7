"""Is `verify` green on every recipe, and red on every injected fault, on the device where the recipes run?

    python benchmarks/verify.py --output benchmarks/results/DATE_verify              # one GPU, within --budget seconds
    python benchmarks/verify.py --cases tensorwise "tensorwise, compiled" --output ...

Each case is one precision over a GPT of 16 blocks. First the configuration as it is, with all faults tried on the plain
module: GREEN, and the smallest fault so many bands away. Then each of the four faults by itself, put into one block of
the configuration: RED, and that block named first. Without a GPU the model is tiny and float8 is emulated; Transformer
Engine's recipes then need a double of it, which the tests have.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from cases import main, unloadable
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.optional.te import engine
from lightning_ups.callbacks import Compile
from lightning_ups.commands.trial import Trial
from lightning_ups.commands.verify import verify
from lightning_ups.config.requested_run import run_of
from lightning_ups.data import RandomTokens
from lightning_ups.insight.verify import FAULTS
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision

CUDA = torch.cuda.is_available()
SEQ, BATCH = (512, 4) if CUDA else (32, 4)
SHAPE = GPTConfig(
    dim=1024 if CUDA else 32,
    num_layers=16,
    num_heads=8 if CUDA else 2,
    num_kv_heads=4 if CUDA else 1,
    ffn_dim=4096 if CUDA else 64,
    vocab_size=4096 if CUDA else 64,
    max_seq_len=SEQ,
)
FAULTY = "model.layers.11"
ENGINE = ("none", "delayed", "current", "block")


class Deep(LightningModule):
    """A GPT of 16 blocks."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(0, verbose=False)
        self.model = GPT(SHAPE)

    @override
    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model(batch[:, :-1], batch[:, 1:])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def precision_of(recipe: str) -> Any:
    """Return the precision that a case is about."""
    if recipe == "bf16":
        return BF16Precision(weights="masters")
    if recipe in ENGINE:
        return TEPrecision(recipe=None if recipe == "none" else recipe, weights="masters")  # type: ignore[arg-type]
    return Float8Precision(recipe=recipe, weights="masters", emulate=not CUDA)  # type: ignore[arg-type]


def trial(recipe: str, *, compiled: bool) -> Trial:
    """Return the configuration of a case, as the command line would make it."""
    settings = {
        "accelerator": "gpu" if CUDA else "cpu",
        "strategy": "auto",
        "devices": 1,
        "num_nodes": 1,
        "precision": None,
        "plugins": [precision_of(recipe)],
        "callbacks": None,
    }
    callbacks = [Compile(backend="inductor" if CUDA else "aot_eager")] if compiled else []
    module = Deep()
    data = RandomTokens(vocab_size=SHAPE.vocab_size, seq_len=SEQ, batch_size=BATCH)
    run = run_of(module, settings, callbacks)
    return Trial(module=module, data=data, settings=settings, callbacks=callbacks, run=run, seed=3)


def seen(recipe: str, *, compiled: bool = False, faults: Iterable[str] = tuple(FAULTS)) -> dict[str, Any]:
    """Verify the configuration as it is, and with each fault in one of its blocks."""
    begun = time.monotonic()
    verdict = verify(trial(recipe, compiled=compiled))
    nearest = verdict.nearest
    found: dict[str, Any] = {
        "green": verdict.green,
        "smallest fault, in bands": None if verdict.power is None else round(verdict.power, 2),
        "nearest to its bound": f"{nearest.block}, step {nearest.step}, {nearest.what}",
        "of its bound": round(nearest.distance / nearest.allowed, 3) if nearest.allowed else None,
        "left the band": [f"{d.block}, step {d.step}, {d.what}: {d.distance:.3g}" for d in verdict.departures[:3]],
        "cannot tell": list(verdict.blind),
        "rounding": verdict.rounding,
    }
    print(found, flush=True)
    named = {}
    for name in faults:
        broken = verify(trial(recipe, compiled=compiled), steps=1, faults=False, fault=(FAULTY, FAULTS[name]))
        named[name] = broken.block if broken.departures else "not seen"
        print(f"{name}: {named[name]}", flush=True)
    found["faults"] = named
    found["ok"] = verdict.green and all(block == FAULTY for block in named.values())
    return found | {"seconds": round(time.monotonic() - begun, 1)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{recipe: partial(seen, recipe) for recipe in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", *ENGINE)},
    **{f"{recipe}, compiled": partial(seen, recipe, compiled=True) for recipe in ("bf16", "tensorwise", "current")},
}


def unmet(cases: Iterable[str]) -> str | None:
    """Say what the cases need and is not there."""
    recipes = {case.partition(",")[0] for case in cases}
    what = "a case of Transformer Engine"
    if recipes & {*ENGINE} and (lacks := unloadable("transformer_engine", what=what, load=lambda _: engine())):
        return f"{lacks}: name others by --cases"
    if recipes - {"bf16", *ENGINE} and (lacks := unloadable("torchao.float8", what="a case of float8")):
        return f"{lacks}: name others by --cases"
    return None


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main(CASES, columns=("ok", "green", "smallest fault, in bands", "of its bound", "error"), unmet=unmet)
