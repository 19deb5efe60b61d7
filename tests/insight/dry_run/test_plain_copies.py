"""The FLOPs of LightningModules as users write them, and that counting acts on nothing of the run."""

import random

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.insight.throughput import step_flops
from lightning_ups.precision import BF16Precision
from tests.toys import Net, loader, trainer

LAYER = 2 * 4 * 8 * 8  # one product of four rows


class Hooked(LightningModule):
    """Counts its first batch from within a fit, as the callback does."""

    def __init__(self):
        super().__init__()
        self.layer, self.found = nn.Linear(8, 8), None

    def on_train_batch_start(self, batch, index):
        if index == 0:
            self.found = step_flops(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def counted(module, tmp_path, **options):
    trainer(tmp_path, epochs=1, **options).fit(module, loader(4))
    return module.found.model


def test_logging_and_the_trainer_may_be_used_as_always(tmp_path):
    class Usual(Hooked):
        def training_step(self, batch, index):
            noise = torch.randn(batch.shape, device=self.device) * self.trainer.max_epochs
            loss = self.layer(batch + noise).square().mean()
            self.log("train_loss", loss, prog_bar=True, sync_dist=True)
            self.log_dict({"twice": 2 * loss, "value": loss.item()})
            if self.global_step > 1000 or loss.isnan():
                raise RuntimeError("no")
            return {"loss": loss}

    assert counted(Usual(), tmp_path) == 2 * LAYER


def test_every_generator_goes_on_as_if_nothing_had_happened(tmp_path):
    class Random(Hooked):
        def training_step(self, batch, index):
            for draw in (random.random, np.random.rand, torch.default_generator.seed):
                draw()
            torch.rand(1, device="cpu")
            return self.layer(batch).sum()

        def on_train_batch_start(self, batch, index):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(1)
            super().on_train_batch_start(batch, index)
            self.drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))

    module = Random()
    counted(module, tmp_path)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert module.drawn == (random.random(), float(np.random.rand()), float(torch.rand(1)))


def test_flops_are_those_of_the_plain_module(tmp_path):
    """Compiled, recomputed, with weights of low precision: FLOPs are the plain module's."""

    class Found(Callback):
        found = None

        def on_train_batch_start(self, trainer, module, batch, index):
            self.found = step_flops(module, batch)

    compiled, callback = Compile(backend="aot_eager"), Found()
    recomputing = ActivationCheckpoint(save="nothing", blocks=["layers.*"])
    made = trainer(tmp_path, callbacks=[compiled, recomputing, callback], epochs=1, plugins=[BF16Precision()])
    made.fit(Net(), loader(4))
    plain = Found()
    trainer(tmp_path, callbacks=[plain], epochs=1).fit(Net(), loader(4))
    assert callback.found.model == plain.found.model
    assert callback.found.hardware > callback.found.model == plain.found.hardware
