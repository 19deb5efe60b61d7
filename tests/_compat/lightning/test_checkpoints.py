import os

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ups._compat.lightning.checkpoints import (
    checkpoints_beside,
    checkpoints_in_dirpath,
    kept_checkpoints,
    last_checkpoints,
    roll_back,
)
from tests.toys import Net


def test_they_are_those_that_callbacks_left(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path / "b"), OnExceptionCheckpoint(tmp_path)]
    trainer = Trainer(callbacks=callbacks, accelerator="cpu", logger=False)
    assert last_checkpoints(trainer) == set()
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "b" / "last.ckpt", tmp_path / "b" / "last-v1.ckpt", tmp_path / "on_exception.ckpt"]
    for path in (*paths, tmp_path / "b" / "epoch=1.ckpt"):
        path.touch()
    assert last_checkpoints(trainer) == {*map(str, paths)}


def written(*paths):
    for second, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (second // 2, second // 2))  # two in each second


def test_those_of_an_earlier_run_are_in_the_dirpath(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path / "ck"), ModelCheckpoint(monitor="x")]
    trainer = Trainer(callbacks=callbacks, accelerator="cpu", logger=CSVLogger(tmp_path))
    assert checkpoints_in_dirpath(trainer) == []
    paths = [tmp_path / "ck" / "epoch=3.ckpt", tmp_path / "ck" / "last.ckpt"]
    written(*paths)
    assert checkpoints_in_dirpath(trainer) == paths


def test_those_of_other_runs_are_beside(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=CSVLogger(tmp_path))
    assert checkpoints_beside(trainer) == []
    runs = tmp_path / "lightning_logs"
    paths = [runs / f"version_{run}" / "checkpoints" / name for run in (1, 0) for name in ("epoch=1.ckpt", "last.ckpt")]
    written(*paths)
    assert checkpoints_beside(trainer) == paths
    assert checkpoints_beside(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)) == []


def test_those_that_are_kept_are_those_of_this_run(tmp_path):
    best, last = tmp_path / "epoch=1.ckpt", tmp_path / "last.ckpt"
    callback, failed = ModelCheckpoint(tmp_path, monitor="x"), OnExceptionCheckpoint(tmp_path)
    trainer = Trainer(callbacks=[callback, failed], accelerator="cpu", logger=False)
    callback.best_model_path, callback.last_model_path, callback.best_k_models = str(best), str(last), {"gone.ckpt": 1}
    assert kept_checkpoints(trainer) == []
    written(best, last)
    assert kept_checkpoints(trainer) == [best, last]
    written(tmp_path / "other.ckpt", best, last, tmp_path / "on_exception.ckpt")
    assert kept_checkpoints(trainer)[-1].name == "last.ckpt"


class Back(Callback):
    """Saves at one batch, and goes back at a later one."""

    def __init__(self, path, *, save=3, back=6):
        self.path, self.save, self.back = path, save, back
        self.loaded, self.batches, self.logged = 0, [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.batches.append(index)
        if index == self.save:
            trainer.save_checkpoint(self.path)
            self.saved = (trainer.global_step, state_of(trainer))
        if index == self.back:
            module.head.weight.grad = torch.ones_like(module.head.weight)
            roll_back(trainer, self.path)
            self.after = (trainer.global_step, state_of(trainer))
            self.grads = [p.grad for p in module.parameters()]

    def on_load_checkpoint(self, *args):
        self.loaded += 1


def state_of(trainer):
    return {
        "weights": [p.detach().clone() for p in trainer.lightning_module.parameters()],
        "moments": [s["exp_avg"].clone() for s in trainer.optimizers[0].state.values()],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.fixture
def back(tmp_path):
    callback = Back(tmp_path / "saved.ckpt")
    rows = torch.randn(12, 4, 8)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Scheduled(), DataLoader([*rows], batch_size=None))
    callback.end = trainer.global_step
    return callback


def test_steps_weights_moments_and_schedule_are_those_that_were_saved(back):
    (step, before), (step_after, after) = back.saved, back.after
    assert step == step_after == 4
    assert before["schedule"] == after["schedule"]
    assert before["rate"] == after["rate"]
    for part in ("weights", "moments"):
        assert all(map(torch.equal, before[part], after[part]))


def test_no_gradient_of_what_is_undone_is_left(back):
    assert back.grads == [None] * len(back.grads)


def test_the_data_go_on_and_so_do_callbacks(back):
    assert back.batches == [*range(12)]
    assert back.end == 4 + 5
    assert back.loaded == 0
