import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_ups._compat.lightning.logging.logger_connector import connector, is_row_of_step, remember, to_scalar
from lightning_ups.transforms.patching import instead_of
from tests.toys import Net, loader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Logs(Net):
    def training_step(self, batch, index):
        self.log("loss", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, index)

    def validation_step(self, batch, _):
        self.log("val", 2.0, on_step=True, on_epoch=True)


class Listens(Callback):
    def __init__(self):
        self.heard = []

    def on_sanity_check_start(self, trainer, _):
        stock = connector(trainer).log_metrics

        def log_metrics(metrics, step=None):
            self.heard.append((sorted(metrics), step, is_row_of_step(trainer)))
            stock(metrics, step)

        self.place = instead_of(connector(trainer), "log_metrics", log_metrics)
        self.place.__enter__()


def test_all_that_loops_log_goes_through_it_and_rows_of_steps_are_told_apart(tmp_path):
    listens = Listens()
    run = Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[listens],
        logger=CSVLogger(tmp_path),
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(Logs(), loader(4), loader(8))
    of_training = [(names, step) for names, step, of_step in listens.heard if of_step]
    assert of_training == [(["loss_step"], None)] * 2
    others = [(names, step) for names, step, of_step in listens.heard if not of_step]
    assert (["val_step"], 0) in others
    assert (["val_epoch"], None) in others
    assert (["loss_epoch"], None) in others


def test_what_is_remembered_is_among_what_is_logged(tmp_path):
    run = Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False)
    value = torch.tensor(1.0)
    remember(run, {"loss": value})
    assert run.logged_metrics["loss"] is value


def test_numbers_are_as_loggers_get_them():
    assert to_scalar(torch.tensor([2])) == 2
    assert to_scalar(3.5) == 3.5
    with pytest.raises(ValueError, match="single element"):
        to_scalar(torch.ones(2))
