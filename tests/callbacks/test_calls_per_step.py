"""What a step costs the host in calls, once the checks of the first steps are over."""

import sys
from functools import partial
from statistics import median

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.callbacks import AccelerationFlags, Compile
from lightning_ups.config import presets
from lightning_ups.precision import BF16Precision

SETTLED, COUNTED = 30, 20
MOST = 44  # with torch 2.11; 40 with 2.13


class Root(nn.Module):
    """A class that is not torch's own, of which ``module.compile()`` compiles nothing."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x):
        return self.linear(x)


class Automatic(LightningModule):
    def __init__(self):
        super().__init__()
        self.one, self.other = Root(8), Root(1)

    def training_step(self, batch, batch_idx):
        loss = self.other(self.one(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=1e-3)


class Manual(Automatic):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            loss = self.other(self.one(batch)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class TwoOptimizers(Manual):
    @override
    def configure_optimizers(self):
        return SGD(self.one.parameters(), lr=1e-3), AdamW(self.other.parameters(), lr=1e-3)


class Counting(Callback):
    """Counts the calls between the starts of two batches."""

    def __init__(self):
        self.counts, self.calls = [], 0

    @override
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        sys.setprofile(None)
        if batch_idx > SETTLED:
            self.counts.append(self.calls)
        if batch_idx >= SETTLED:
            self.calls = 0
            sys.setprofile(self._count)

    @override
    def on_train_end(self, trainer, pl_module):
        sys.setprofile(None)

    def _count(self, frame, event, argument):
        self.calls += event in ("call", "c_call")


def calls_of(module, tmp_path, *, callbacks=(), **options):
    counting = Counting()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        callbacks=[*callbacks, counting],
        **options,
    )
    try:
        trainer.fit(module, DataLoader(torch.randn(SETTLED + COUNTED + 1, 8), batch_size=1))
    finally:
        sys.setprofile(None)
    assert len(counting.counts) == COUNTED
    return median(counting.counts)  # some steps collect garbage


def preset():
    settings = yaml.safe_load(presets.text("h100"))
    plugins, callbacks = (
        [instantiate_class((), each) for each in settings["trainer"][name]] for name in ("plugins", "callbacks")
    )
    return {"plugins": plugins, "callbacks": [AccelerationFlags(**settings["flags"]), *callbacks]}


SIDES = {
    "precision": lambda: {"plugins": BF16Precision()},
    "compile": lambda: {"precision": "bf16-mixed", "callbacks": [Compile(scope="auto", mode="auto")]},
    "flags": lambda: {"precision": "bf16-mixed", "callbacks": [AccelerationFlags(attention="auto", tf32=True)]},
    "preset": preset,
}


@pytest.mark.parametrize("kind", [Automatic, Manual, TwoOptimizers])
def test_a_settled_step_of_what_is_not_compiled_is_that_of_stock(kind, tmp_path):
    stock = calls_of(kind(), tmp_path, precision="bf16-mixed")
    more = {}
    for side, options in SIDES.items():
        forwards, module = [], kind()
        module.on_train_end = partial(
            lambda f, m: f.extend("forward" in vars(e) for e in m.modules()), forwards, module
        )
        more[side] = calls_of(module, tmp_path, **options()) - stock
        assert not any(forwards), side
    assert max(more.values()) <= MOST, more
    assert more["preset"] <= 0, "what it spares outweighs what it adds"


@pytest.mark.parametrize("kind", [Automatic, TwoOptimizers])
def test_compiled_code_is_called_as_by_torch(kind, tmp_path):
    bare, module = kind(), kind()
    for root in bare.children():
        root.compile(backend="aot_eager")
    expected = calls_of(bare, tmp_path, precision="bf16-mixed")
    callback, compiled = Compile(scope="model", backend="aot_eager"), []
    module.on_train_end = lambda: compiled.extend("forward" in vars(root) for root in module.children())
    more = calls_of(module, tmp_path, precision="bf16-mixed", callbacks=[callback]) - expected
    assert compiled == [True, True]
    assert more <= MOST, more
