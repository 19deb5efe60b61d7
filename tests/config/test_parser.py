import re

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config.layers import Layer
from lightning_ups.config.parser import ReadConfig, UpsParser
from tests.command import assert_short, run


@pytest.fixture
def parser():
    parser = UpsParser(exit_on_error=False)
    parser.add_argument("--config", action=ReadConfig)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(AccelerationFlags, "flags")
    return parser


def test_text_that_replaces_a_file(parser, tmp_path):
    (tmp_path / "trainer.yaml").write_text("max_epochs: 3\n")
    parser.texts = {"run.yaml": Layer(name="run.yaml", tree={"trainer": "trainer.yaml"}, folder=tmp_path)}
    assert parser.parse_args(["--config", "run.yaml"]).trainer.max_epochs == 3  # relative to the file


def test_other_files_are_read(parser, tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {max_epochs: 4}\n")
    assert parser.parse_args(["--config", str(tmp_path / "run.yaml")]).trainer.max_epochs == 4
    assert parser.parse_args(["--config", "{trainer: {max_epochs: 5}}"]).trainer.max_epochs == 5


def test_later_words_win(parser):
    parser.texts = {"a": Layer(name="a", tree={"trainer": {"max_epochs": 1, "min_epochs": 1}})}
    config = parser.parse_args(["--config", "a", "--trainer.max_epochs", "2"])
    assert (config.trainer.max_epochs, config.trainer.min_epochs) == (2, 1)


def test_the_help_reads_well(parser):
    text = parser.format_help()
    assert text.index("flags (AccelerationFlags") < text.index("trainer (arguments of Lightning's Trainer)")
    assert ".help" not in text
    classes = re.search(r"known\s+subclasses: ([^)]*Compile[^)]*)\)", text)
    assert classes is not None
    assert "." not in classes[1]
    assert parser.format_help() == text  # asking twice changes nothing
    assert "``" not in text


def test_the_help_offers_each_public_class_once(parser):
    parser.add_subclass_arguments((Optimizer,), "optimizer", required=False)
    parser.add_subclass_arguments((LRScheduler, ReduceLROnPlateau), "lr_scheduler", required=False)
    text = " ".join(parser.format_help().split())
    listed = [names.split(", ") for names in re.findall(r"known subclasses: ([^)]*)\)", text)]

    def names(known):
        return next(each for each in listed if known in each)

    assert names("ReduceLROnPlateau").count("ReduceLROnPlateau") == 1
    assert {*names("SGD")} >= {"SGD", "AdamW", "Muon"}
    assert {*names("Compile")} >= {"EarlyStopping", "ActivationCheckpoint", "MineIsShown"}
    internal = {"MasteredOptimizer", "OffloadedOptimizer", "TorchAOOffloaded", "Declaration", "StepClock"}
    assert not internal & {*names("SGD"), *names("Compile")}


class MineIsShown(Callback):
    pass


def test_the_help_of_a_class_is_there(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--trainer.callbacks.help", "Compile"])
    assert "--trainer.callbacks.fullgraph" in capsys.readouterr().out
    assert issubclass(AccelerationFlags, Callback)


def test_no_file_of_the_users_is_overwritten(ups, folder):
    # Without a logger, what is written lies in the folder of the command, where a config.yaml is probably the user's.
    text = "# mine\n" + yaml.safe_dump(run(trainer={"logger": False, "enable_checkpointing": False}))
    (folder / "config.yaml").write_text(text)
    for _ in range(2):
        assert ups("fit", "--config", "config.yaml").code == 0
    assert (folder / "config.yaml").read_text() == text
    assert {path.name for path in folder.glob("config*")} == {"config.yaml", "config-2.yaml", "config-3.yaml"}
    assert yaml.safe_load((folder / "config-2.yaml").read_text())["trainer"]["logger"] is False


def test_a_logger_that_has_no_folder(ups, folder):
    done = ups("fit", tree=run(trainer={"logger": {"class_path": "tests.cli_toys.Nowhere"}}))
    assert done.code == 0, done.err
    assert (folder / "nowhere" / "run-1" / "config.yaml").exists()
    assert "--config nowhere/run-1/config.yaml" in done.out


def test_a_folder_that_cannot_be_written(ups, folder):
    (folder / "file").touch()
    done = ups("fit", "--trainer.default_root_dir", "file", tree=run())
    assert_short(done, "file/lightning_logs", "trainer.default_root_dir")
    done = ups("fit", "--trainer.default_root_dir", "file", "--trainer.logger", "false", tree=run())
    assert_short(done, "file is not writable", "trainer.default_root_dir")


def test_without_a_fit_a_folder_that_cannot_be_written_is_no_fault(ups, folder):
    (folder / "file").touch()
    words = ("--trainer.default_root_dir=file", "--trainer.logger=false", "--trainer.limit_val_batches=1")
    done = ups("validate", *words, tree=run())
    assert done.code == 0, done.err
    assert len([line for line in done.err.splitlines() if "config.yaml" in line]) == 1
