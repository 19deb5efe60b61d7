import re

import pytest
from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config.layers import Layer
from lightning_ups.config.parser import ReadConfig, UpsParser


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
