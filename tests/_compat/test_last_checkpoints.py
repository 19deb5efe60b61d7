from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_ups._compat.last_checkpoints import last_checkpoints


def test_they_are_those_that_callbacks_left(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path / "b"), OnExceptionCheckpoint(tmp_path)]
    trainer = Trainer(callbacks=callbacks, accelerator="cpu", logger=False)
    assert last_checkpoints(trainer) == set()
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "b" / "last.ckpt", tmp_path / "b" / "last-v1.ckpt", tmp_path / "on_exception.ckpt"]
    for path in (*paths, tmp_path / "b" / "epoch=1.ckpt"):
        path.touch()
    assert last_checkpoints(trainer) == {*map(str, paths)}
