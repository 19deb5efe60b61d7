"""Loggers x what writes to them: the store of each logger, read from its files, has all that a run gave to it."""

import csv
import json
import math
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CometLogger, CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from lightning_ups.callbacks import AccelerationFlags, RunManifest, StepGuard, TokenThroughput, TrainingReport
from lightning_ups.precision import BF16Precision
from tests.callbacks.logs.test_run_manifest import shown_by_tensorboard
from tests.insight.report.test_run_files import Normalized, mlflow_logger, wandb_logger
from tests.late_device import put_in_place
from tests.toys import loader

STEPS = 16
ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "WANDB_SILENT": "true",
    "COMET_START_ONLINE": "0",  # CometLogger(online=False) of Lightning 2.6.6 makes an experiment that stores nothing
    "COMET_INTERNAL_SENTRY_DSN": "",
}
pytestmark = pytest.mark.filterwarnings("ignore")


class Late(Normalized):
    """Trains on a device that is some batches behind."""

    def __init__(self, device):
        super().__init__()
        self.late = device

    def training_step(self, batch, batch_idx):
        self.late.batch += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch):
        self.log("loss/val", self.head(batch).mean())


def comet_logger(folder):
    pytest.importorskip("comet_ml")
    quiet = dict.fromkeys(("auto_output_logging", "log_code", "log_env_details", "log_git_metadata"), False)
    return CometLogger(project="project", offline_directory=str(folder), **quiet)


# The content of a store: rows, each a step and metrics; hyperparameters; files by name


def of_tensorboard(logger, folder):
    events = EventAccumulator(logger.log_dir).Reload()
    rows = [(point.step, {name: point.value}) for name in events.Tags()["scalars"] for point in events.Scalars(name)]
    (params,) = shown_by_tensorboard(folder).values()
    return rows, params, in_folder(logger.log_dir)


def of_csv(logger, _):
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [(row.pop("step"), row) for row in csv.DictReader(file)]
    return rows, yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()), in_folder(logger.log_dir)


def of_mlflow(logger, folder):
    client, run = logger.experiment, logger.experiment.get_run(logger.run_id)
    assert {each.name for each in client.search_experiments()} == {"experiment", "Default"}
    points = [point for name in run.data.metrics for point in client.get_metric_history(logger.run_id, name)]
    (artifacts,) = folder.rglob("artifacts")
    return [(point.step, {point.key: point.value}) for point in points], run.data.params, in_folder(artifacts)


def of_wandb(_, folder):
    wandb.finish()
    wandb.teardown()  # waits until the file is written
    (path,) = folder.rglob("*.wandb")
    assert not any(file.is_symlink() for file in (path.parent / "files").rglob("*"))  # of which W&B warns
    rows, params = [], {}
    for record in map(Record.FromString, records(path.read_bytes())):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        rows.append((row.get("trainer/global_step"), row))
        params |= {item.key: json.loads(item.value_json) for item in record.config.update}
    return rows, params, in_folder(path.parent / "files")


def records(data):
    """Yield the records of a log of LevelDB, which has blocks of 32 KiB; a record may lie in several."""
    place, record = 7, b""
    while place < len(data):
        if -place % 2**15 < 7 and place % 2**15:  # no room for a head
            place += -place % 2**15
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record, place = record + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # all of it, or its last part
            yield record
            record = b""


def of_comet(logger, folder):
    logger.experiment.end()
    (path,) = folder.rglob("*.zip")
    with zipfile.ZipFile(path) as archive:
        payloads = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
        sent = [each for each in payloads if "file_path" in each]
        files = {each["additional_params"]["fileName"]: archive.read(each["file_path"]) for each in sent}
    metrics = [each["metric"] for each in payloads if "metric" in each]
    params = {each["param"]["paramName"]: each["param"]["paramValue"] for each in payloads if "param" in each}
    return [(metric["step"], {metric["metricName"]: metric["metricValue"]}) for metric in metrics], params, files


def in_folder(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


LOGGERS = {
    "tensorboard": (TensorBoardLogger, of_tensorboard),
    "csv": (CSVLogger, of_csv),
    "mlflow": (mlflow_logger, of_mlflow),
    "wandb": (wandb_logger, of_wandb),
    "comet": (comet_logger, of_comet),
}


def trainer(folder, logger, *callbacks, **options):
    return Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[*callbacks],
        plugins=[BF16Precision()],
        default_root_dir=folder / "root",
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.fixture(scope="module", params=LOGGERS)
def run(request, tmp_path_factory):
    """Fit, validate with the same Trainer, log once more, and read the store."""
    build, read = LOGGERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    manifest, report, again = RunManifest(), TrainingReport(pictures=False), RunManifest()
    parts = [AccelerationFlags(late_logs=True), manifest, TokenThroughput(warmup_steps=2), report, StepGuard()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(rank_zero_only, "rank", 0)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        module, logger = Late(put_in_place(patch.setattr, lag=3)), build(folder)
        lightning = trainer(folder, logger, *parts, max_steps=STEPS)
        lightning.fit(module, loader(2))
        written = manifest.path, report.path
        lightning.validate(module, loader(4), verbose=False)
        logger.log_metrics({"after/all": 0.5}, step=99)
        logger.finalize("success")
        rows, params, files = read(logger, folder)
        metrics = {}
        for step, row in rows:
            for name, value in row.items():
                if value not in ("", None):
                    metrics.setdefault(name, []).append((int(step or 0), value))
        logger = build(folder)
        trainer(folder, logger, again, max_steps=1).fit(module, loader(2))
        getattr(logger.experiment, "end", wandb.finish)()
    return SimpleNamespace(
        metrics=metrics, params=params, files=files, losses=module.losses, written=written, second=again.path
    )


def test_manifest(run):
    assert float(run.params["manifest/precision/layers/BatchNorm1d/param float32 compute float32"]) == 1
    assert str(run.params["manifest/optimizers/0/settings/betas"]) == "[0.9, 0.999]"
    assert run.files["manifest.json"] == run.written[0].read_bytes()
    assert json.loads(run.files["manifest.json"])["run"]["status"] == "finished"
    assert json.loads(run.files["manifest-2.json"])["run"]["kind"] == "validate"
    assert run.second.name == "manifest.json"
    assert run.second.parent != run.written[0].parent


def test_throughput(run):
    steps, rates = zip(*run.metrics["throughput/samples_per_s"], strict=True)
    assert sorted(set(steps)) == [*steps]
    assert set(steps) <= set(range(2, STEPS))
    assert all(0 < float(rate) < math.inf for rate in rates)


def test_report(run):
    assert run.files["report.html"] == run.written[1].read_bytes()
    page = run.files["report.html"].decode()
    assert f"{STEPS} steps" in page
    assert "samples per second" in page
    assert "loss" in page


def test_late_values(run):
    losses = [(step, pytest.approx(float(loss))) for step, loss in enumerate(run.losses[:STEPS])]
    assert [(step, float(value)) for step, value in run.metrics["loss/train"]] == losses
    ((_, value),) = run.metrics["loss/val"]
    assert math.isfinite(float(value))
    assert [(step, float(value)) for step, value in run.metrics["after/all"]] == [(99, 0.5)]
