"""What loggers with a store of their own get of a run, and where its files lie."""

import base64
import json
import re
import struct
from io import BytesIO
from pathlib import Path

import pytest
import torch
import wandb
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from torch import nn

from lightning_ups.callbacks import RunManifest, TrainingReport
from lightning_ups.cli import main
from lightning_ups.insight.report import give_to_loggers
from lightning_ups.precision import BF16Precision
from tests.command import DATA, MODEL
from tests.toys import Net, loader

pytestmark = pytest.mark.filterwarnings("ignore")


class Normalized(Net):
    """Has layers of more types than one, whose names MLflow would refuse."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(self.norm(batch), batch_idx)
        self.log("loss/train", loss)
        return loss


def mlflow_logger(folder):
    return MLFlowLogger("experiment", tracking_uri=f"file:{folder}/mlruns")


def wandb_logger(folder):
    return WandbLogger(project="project", save_dir=folder / "wandb-logs", offline=True)


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.finish()


def fit(folder, logger, *callbacks, module=None, **options):
    Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=logger,
        callbacks=[*callbacks],
        plugins=[BF16Precision()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **options,
    ).fit(module or Normalized(), loader(4))


class Drawing(Normalized):
    def training_step(self, batch, batch_idx):
        image = torch.zeros(3, 4, 4)
        image[self.global_step % 3] = 1
        if isinstance(self.logger, TensorBoardLogger):
            self.logger.experiment.add_image("drawn/sample", image, self.global_step)
        else:
            self.logger.log_image("drawn/sample", [image], step=self.global_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("logger", [TensorBoardLogger, wandb_logger], ids=["tensorboard", "wandb"])
def test_the_report_has_the_last_of_each_logged_image(tmp_path, logger):
    report = TrainingReport(pictures=False)
    fit(tmp_path, logger(tmp_path), report, module=Drawing())
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', report.path.read_text())
    drawn = Image.open(BytesIO(base64.b64decode(picture)))
    assert drawn.size == (4, 4)
    red, *others = drawn.getpixel((0, 0))
    assert red
    assert others == [0, 0]  # of step 3
    assert "<figcaption>drawn/sample</figcaption>" in report.path.read_text()


@pytest.mark.filterwarnings("default")
def test_a_torn_file_of_events_ends_no_run(tmp_path):
    report, logger = TrainingReport(pictures=False), TensorBoardLogger(tmp_path)
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.0").write_bytes(struct.pack("<QI", 9, 0) + b"\x89PNG torn")
    logger._version = 0
    with pytest.warns(UserWarning, match="cannot read images of TensorBoardLogger"):
        fit(tmp_path, logger, report)
    assert report.path.exists()


def test_a_store_that_is_not_reached_ends_no_run(tmp_path, monkeypatch):
    logger, manifest = mlflow_logger(tmp_path), RunManifest()

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(logger.experiment), "log_artifact", refuse)
    with pytest.warns(UserWarning, match=r"MLFlowLogger did not keep manifest\.json: .*no route to host"):
        fit(tmp_path / "root", logger, manifest)
    assert manifest.path.exists()


def of_rank(folder):
    manifest = RunManifest()
    logger = WandbLogger(project="project", save_dir=folder, offline=True)
    fit(folder, [logger, CSVLogger(folder)], manifest, strategy="ddp", devices=2)
    return manifest._folder


def test_ranks_agree_on_the_folder(ranks, tmp_path):
    assert Path(ranks(of_rank, tmp_path)).parent == tmp_path / "project"


def test_the_command_line_gives_its_configuration_to_mlflow(tmp_path):
    logger = {"class_path": "lightning.pytorch.loggers.MLFlowLogger"}
    logger["init_args"] = {"tracking_uri": f"file:{tmp_path}/mlruns"}
    run = {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False, "logger": logger}
    (tmp_path / "run.yaml").write_text(json.dumps({"trainer": run, "model": MODEL, "data": DATA}))
    main(["fit", "--config", "run.yaml"])
    kept = {path.name for path in (tmp_path / "mlruns").glob("*/*/artifacts/*")}
    assert {"config.yaml", "manifest.json"} <= kept


def test_a_configuration_has_another_name_than_that_of_wandb(tmp_path):
    (tmp_path / "config.yaml").write_text("ours: 1")
    logger = wandb_logger(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=logger)
    give_to_loggers(trainer, tmp_path / "config.yaml")
    kept = Path(logger.experiment.dir)
    assert (kept / "lightning_ups-config.yaml").read_text() == "ours: 1"
    assert not (kept / "config.yaml").exists()
