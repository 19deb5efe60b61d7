import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger

from lightning_ups._compat.lightning.hyperparameters import logged_hyperparameters
from tests.toys import Net, loader


class Kept(Logger):
    """Keeps what Lightning logs."""

    def __init__(self):
        super().__init__()
        self.seen = None

    name = version = ""

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        self.seen = dict(params)


class Module(Net):
    def __init__(self, width=1, logged=True):
        super().__init__()
        self.save_hyperparameters("width", logger=logged)


class Data(LightningDataModule):
    def __init__(self, size=4, logged=True):
        super().__init__()
        self.save_hyperparameters("size", logger=logged)

    def train_dataloader(self):
        return loader(self.hparams.size)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("of_module", [True, False])
@pytest.mark.parametrize("of_data", [True, False])
def test_it_is_what_lightning_logs(tmp_path, of_module, of_data):
    logger = Kept()
    run = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    run.fit(Module(logged=of_module), Data(logged=of_data))
    assert logged_hyperparameters(run) == (logger.seen or {})
    assert ("width" in logged_hyperparameters(run)) is of_module
