import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from lightning_ups.commands.next_steps import closing_lines


def test_no_closing_lines_without_a_logger(tmp_path):
    trainer = Trainer(logger=False, enable_checkpointing=False, default_root_dir=tmp_path, accelerator="cpu")
    assert [*closing_lines(trainer, program="x")] == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_checkpoint_elsewhere_keeps_its_name(tmp_path, interrupted):
    kept = ModelCheckpoint()
    kept.best_model_path = "s3://kept/x.ckpt"
    trainer = Trainer(logger=False, callbacks=[kept], default_root_dir=tmp_path, accelerator="cpu")
    assert "checkpoint  s3://kept/x.ckpt" in closing_lines(trainer, program="x", interrupted=interrupted)


def test_a_logger_of_the_working_directory_is_not_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(logger=WandbLogger(save_dir=".", offline=True), accelerator="cpu")
    assert not [line for line in closing_lines(trainer, program="x") if line.startswith("logs")]
