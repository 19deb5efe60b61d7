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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "after a validation or an epoch, and the run ended at step 0"),
        ({"every_n_train_steps": 500}, "at step 500, and the run ended at step 0"),
        ({"save_top_k": 0}, None),
        ({"monitor": "val_los"}, "monitors 'val_los', which the run did not log. Logged: nothing."),
    ],
)
def test_a_fit_that_writes_no_checkpoint_says_why(tmp_path, settings, expected):
    saver = ModelCheckpoint(dirpath=tmp_path, **settings)
    trainer = Trainer(logger=False, callbacks=[saver], default_root_dir=tmp_path, accelerator="cpu")
    lines = [line for line in closing_lines(trainer, program="x") if "none: ModelCheckpoint" in line]
    assert [expected in line for line in lines] == ([True] if expected else [])


def test_a_last_checkpoint_is_named_if_there_is_no_best(tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, save_top_k=0, save_last=True)
    saver.last_model_path = str(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").touch()
    trainer = Trainer(logger=False, callbacks=[saver], default_root_dir=tmp_path, accelerator="cpu")
    assert any("last.ckpt" in line for line in closing_lines(trainer, program="x"))
