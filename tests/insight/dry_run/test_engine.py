"""Dry runs of LightningModules as users write them."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_ups.insight.dry_run import DryRun, FakeCopies, call_training_step, loss_in, plain_run
from lightning_ups.insight.dry_run.engine import StandInOptimizer, StandInTrainer
from tests.toys import Net, data


def run(module, batch=None):
    with plain_run(module, data() if batch is None else batch) as dry_run:
        return loss_in(call_training_step(dry_run.module, dry_run.batch))


class Logging(Net):
    """Writes into a buffer and a list, and logs."""

    shapes: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers[1][0].weight = self.layers[0][0].weight

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)  # outside of fit, Lightning would warn or fail
        assert self.layers[1][0].weight is self.layers[0][0].weight
        self.shapes.append(self.layers[0][0](self.norm(batch)).shape)
        with torch.no_grad():
            self.head.weight.add_(1)
        return super().training_step(batch, batch_idx)


def test_a_step_changes_nothing():
    module = Logging()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert run(module).shape == ()
    assert Logging.shapes.pop() == (8, 32)
    assert module.losses == []
    assert "log" not in vars(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Registering(Net):
    """Knows its subclasses, by a word that each must give."""

    kinds: ClassVar[dict] = {}

    def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        Registering.kinds[kind] = cls


class Registered(Registering, kind="net"):
    pass


def test_a_registry_of_subclasses_does_not_get_the_copy():
    run(Registered())
    assert Registering.kinds == {"net": Registered}


class Manual(Net):
    """Steps two optimizers itself, as a GAN does, with everything that Lightning offers for it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            with second.toggle_model(sync_grad=True):
                loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in (self.layers, self.head)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]


def test_manual_optimization_with_all_that_lightning_offers():
    module = Manual()
    assert run(module) is None
    assert "optimizers" not in vars(module)


class Asking(Net):
    def training_step(self, batch):
        assert self.trainer.world_size == 4
        assert self.global_step == 0
        assert self.trainer.estimated_stepping_batches > 0
        with pytest.raises(AttributeError, match="stand-in"):
            _ = self.trainer.fit_loop
        return {"loss": self.head(batch).sum()}


def test_a_described_run_has_a_stand_in_for_the_trainer():
    dry_run = DryRun(Asking(), data(), copies=FakeCopies(), world_size=4)
    with dry_run.opened():
        assert loss_in(call_training_step(dry_run.module, dry_run.batch)).is_meta


class Fetching(Net):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


def test_a_step_may_fetch_its_batch():
    assert run(Fetching()).shape == ()


@pytest.mark.parametrize("output", [None, {}, "loss"])
def test_not_every_result_has_a_loss(output):
    assert loss_in(output) is None


def test_attributes_of_a_trainer_are_copied_and_written_to_the_stand_in(tmp_path):
    real = SimpleNamespace(loggers=[CSVLogger(tmp_path)], rows=[1], should_stop=False)
    trainer = StandInTrainer(real, lambda value, name: [*value], world_size=2)
    trainer.rows.append(2)
    trainer.should_stop = True
    trainer.logger.log_metrics({"a": 1.0})
    trainer.logger.experiment.metrics["a"] = 2.0
    assert (real.rows, real.should_stop, trainer.world_size) == ([1], False, 2)
    assert trainer.logger.log_dir == real.loggers[0].log_dir
    assert not real.loggers[0].experiment.metrics


def test_an_optimizer_calls_its_closure_and_does_nothing_else():
    optimizer = StandInOptimizer()
    assert optimizer.step(lambda: 3) == 3
    assert optimizer.zero_grad() is optimizer.load_state_dict({}) is None
    with optimizer.toggle_model(sync_grad=True):
        assert optimizer.param_groups[0]["lr"] == 0
