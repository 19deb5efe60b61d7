import math

import pytest
from lightning.pytorch import LightningDataModule

from lightning_ups.callbacks.logs.unigram_baseline import UnigramBaseline
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Data(LightningDataModule):
    unigram_entropy = 2.0

    def train_dataloader(self):
        return loader()

    val_dataloader = train_dataloader


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch.sum() * 0 + 1.5)


def test_prints_loss_entropy_and_ratio(tmp_path, capsys):
    trainer(tmp_path, callbacks=[UnigramBaseline()], epochs=1).fit(Validated(), datamodule=Data())
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines == [
        f"Validation loss  1.500 nats a token ({1.5 / math.log(2):.3f} bits)",
        f"Unigram entropy  2.000 nats a token ({2 / math.log(2):.3f} bits)",
        "Ratio            0.750",
    ]


def test_without_a_validation_it_says_so(tmp_path, capsys):
    trainer(tmp_path, callbacks=[UnigramBaseline()], epochs=1, limit_val_batches=0).fit(Validated(), datamodule=Data())
    assert "No val_loss was logged; the unigram entropy is 2.000 nats" in capsys.readouterr().out


def test_another_name_of_the_loss(tmp_path, capsys):
    trainer(tmp_path, callbacks=[UnigramBaseline(metric="other")], epochs=1).fit(Validated(), datamodule=Data())
    assert "No other was logged" in capsys.readouterr().out


def test_a_datamodule_without_entropy_is_told_before_training(tmp_path):
    class Bare(LightningDataModule):
        train_dataloader = Data.train_dataloader

    with pytest.raises(TypeError, match=r"in Bare\..*take UnigramBaseline out of the callbacks\.$"):
        trainer(tmp_path, callbacks=[UnigramBaseline()]).fit(Validated(), datamodule=Bare())
