import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision

from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.commands.trial import StepClock, Trial
from lightning_ups.config.requested_run import run_of
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.cli_toys import Data, Noted, Toy
from tests.config.test_requested_run import DEFAULTS


class Watch(Callback):
    def __init__(self):
        self.losses, self.trainer, self.checkpointed = [], None, None

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(outputs["loss"].item())
        self.trainer, self.checkpointed = trainer, "forward" in vars(module.blocks[0])


def trial(*, module=None, **settings):
    settings = DEFAULTS | {"accelerator": "cpu", "plugins": None, "precision": None} | settings
    module = module or Toy()
    return Trial(module=module, data=Data(), settings=settings, callbacks=[], run=run_of(module, settings, []), seed=3)


def test_a_trial_runs_what_is_declared_from_the_seed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Noted.seen.clear()
    tried = trial(callbacks=[ActivationCheckpoint(save="nothing"), Noted()], plugins=[BF16Precision()])
    state = {name: value.clone() for name, value in tried.module.state_dict().items()}
    first, second = Watch(), Watch()
    tried.fit(first, steps=3)
    assert first.checkpointed
    assert isinstance(first.trainer.precision_plugin, BF16Precision)
    tried.fit(second, steps=3, state=state)
    assert second.losses == first.losses
    assert len(first.losses) == 3
    assert not Noted.seen
    assert not [*tmp_path.iterdir()]


class Writing(Toy):
    """Writes to its logger by itself, and steps by what validation measures."""

    def training_step(self, batch, index):
        self.logger.log_metrics({"seen": 1.0})
        self.logger.experiment.add_text("seen", "this")
        return super().training_step(batch, index)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_a_module_may_write_to_a_logger_and_wait_for_validation():
    watch = Watch()
    tried = trial(module=Writing())
    tried.fit(watch, steps=20)
    assert watch.trainer.current_epoch > 1
    assert len(watch.losses) == 20


class Saving(Toy):
    """Brings a callback that writes into a folder of the user."""

    def configure_callbacks(self):
        return [ModelCheckpoint("precious", every_n_train_steps=1)]


def test_callbacks_of_the_module_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trial(module=Saving()).fit(Watch(), steps=3)
    assert not [*tmp_path.iterdir()]


class Built(Toy):
    """Builds a part when it is first fitted, draws, and writes to the folder of the run."""

    def __init__(self):
        super().__init__()
        self.late, self.drawn = None, []

    def configure_model(self):
        if self.late is None:
            self.late = torch.nn.Linear(4, 4)

    def on_fit_start(self):
        for folder in (self.trainer.log_dir, self.logger.save_dir, self.logger.log_dir):
            (Path(folder) / "written").touch()

    def training_step(self, batch, index):
        self.drawn.append(torch.rand(()).item())
        return super().training_step(batch, index)


def test_each_trial_draws_the_same_after_what_the_first_builds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = trial(module=Built())
    for _ in range(2):
        tried.fit(Watch(), steps=2)
    assert tried.module.drawn[:2] == tried.module.drawn[2:]
    assert not [*tmp_path.iterdir()]


def test_a_plain_trial_leaves_out_strategy_precision_and_callbacks_and_keeps_what_a_step_is():
    asked = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "strategy": "fsdp2"}
    tried = trial(callbacks=[ActivationCheckpoint(save="nothing")], plugins=[BF16Precision()], **asked)
    watch = Watch()
    tried.fit(watch, steps=2, plain=True)
    assert (watch.trainer.accumulate_grad_batches, watch.trainer.gradient_clip_val) == (2, 0.5)
    assert len(watch.losses) == 4
    assert not watch.checkpointed
    assert type(watch.trainer.precision_plugin) is Precision
    assert type(watch.trainer.strategy).__name__ == "SingleDeviceStrategy"


class Level(Callback):
    """Remembers what of Lightning's is heard while it fits."""

    def on_train_batch_end(self, *_):
        self.level = logging.getLogger("lightning.pytorch.utilities.rank_zero").getEffectiveLevel()


def test_what_every_trainer_says_is_left_out():
    before = logging.getLogger("lightning.pytorch").level
    watch = Level()
    trial().fit(watch, steps=1)
    assert watch.level == logging.WARNING
    assert logging.getLogger("lightning.pytorch").level == before != logging.WARNING


def test_a_batch_is_one_of_training():
    tried = trial()
    assert tried.batch().shape == (4, 8)
    assert tried.module.trainer is not None


@pytest.fixture
def ticks(monkeypatch):
    """Let a clock show these times."""

    def ticks(*times):
        left = iter(times)
        monkeypatch.setattr("lightning_ups.commands.trial.time.perf_counter", lambda: next(left))

    return ticks


def test_the_time_of_a_step_leaves_out_the_first(ticks):
    ticks(100.0, 100.5, 102.5)
    clock = StepClock(warmup=2)
    trial(accumulate_grad_batches=2).fit(clock, steps=4, plain=True)
    assert clock.step_ms == pytest.approx(1250)


class Twice(Toy):
    """Steps two optimizers for each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def test_under_manual_optimization_a_step_is_a_batch(ticks):
    ticks(100.0, 101.0, 103.0)
    clock = StepClock(warmup=3)
    trial(module=Twice()).fit(clock, steps=7, plain=True)
    assert clock.step_ms == pytest.approx(1500)


def test_too_few_batches_to_time_one_say_so():
    clock = StepClock(warmup=3)
    trial(module=Twice()).fit(clock, steps=4, plain=True)
    with pytest.raises(ValueError, match=r"1 of 2 batches ended after 3 steps.*Give more --steps"):
        clock.step_ms  # noqa: B018


def test_a_strategy_that_needs_more_devices_says_what_to_try():
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
    tried = trial(strategy=strategy, devices=2)
    with pytest.raises(ValueError, match=r"FSDP2Strategy\(tensor_parallel_size=2\) .*strategy fsdp2"):
        tried.fit(Watch(), steps=1)
    tried.fit(Watch(), steps=1, plain=True)
