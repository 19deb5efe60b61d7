import time

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ups.insight.diagnose.phases import PhaseProfiler
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Measured(Callback):
    def on_train_start(self, trainer, module):
        self.phases = PhaseProfiler(trainer)
        self.phases.is_on = True

    def on_train_epoch_end(self, trainer, module):
        self.phases.rest()

    def on_train_end(self, trainer, module):
        self.phases.finish()
        self.phases.close()


class Sleeps(Net):
    """Sleeps in each phase for a time of its own."""

    def training_step(self, batch, index):
        time.sleep(0.02)
        self.log("loss", 1.0)
        return super().training_step(batch, index)

    def log(self, *args, **options):
        time.sleep(0.04)

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)
        time.sleep(0.03)

    def on_train_batch_start(self, *_):
        time.sleep(0.05)

    def on_save_checkpoint(self, _):
        time.sleep(0.06)


def test_each_phase_has_its_time(tmp_path):
    measured, save = Measured(), ModelCheckpoint(tmp_path, every_n_train_steps=2)
    run = trainer(tmp_path, callbacks=[measured, save], epochs=3, enable_checkpointing=True)
    run.fit(Sleeps(), loader(2))
    phases = measured.phases
    steps = len(phases.step_seconds)
    assert steps == 12
    assert phases.saves == 6
    for name, seconds in (
        ("forward", 0.02 * steps),
        ("logging", 0.04 * steps),
        ("optimizer", 0.03 * steps),
        ("Sleeps.on_train_batch_start", 0.05 * steps),
        ("checkpoint", 0.06 * 6),
    ):
        assert 0.95 * seconds <= phases.seconds[name] < 3 * seconds, (name, dict(phases.seconds))
        assert name == "checkpoint" or phases.host_seconds[name] >= 0.95 * seconds
    assert sum(phases.shares().values()) == pytest.approx(1)
    assert phases.mean_s == pytest.approx(sum(phases.seconds.values()) / 12)
    assert run.profiler is not phases


def test_nothing_is_counted_while_it_is_off(tmp_path):
    class Off(Measured):
        def on_train_start(self, trainer, module):
            super().on_train_start(trainer, module)
            self.phases.is_on = False

    measured = Off()
    trainer(tmp_path, callbacks=[measured], epochs=1).fit(Net(), loader(2))
    assert not measured.phases.step_seconds
    assert not measured.phases.shares()
    assert measured.phases.mean_s == 0
