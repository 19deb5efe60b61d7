import os

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_ups._compat.lightning.last_checkpoints import checkpoints_beside, kept_checkpoints, last_checkpoints


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
