"""TrainingReport leaves a page at the end of fit that holds what was logged and measured."""

import pickle
import re
from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from lightning_ups.callbacks import RunManifest, TokenThroughput, TrainingReport
from tests.toys import Net, data, loader, trainer


class Logging(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", super().training_step(batch, index))

    def val_dataloader(self):
        return loader()


def fit(folder, *callbacks, module=None, logger=None, **options):
    made = Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        max_epochs=options.pop("max_epochs", 6),
        logger=logger or False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=options.pop("log_every_n_steps", 2),
        default_root_dir=folder,
        **options,
    )
    made.fit(module or Logging(), loader(4))
    return made


def throughput(**settings):
    return TokenThroughput(**{"warmup_steps": 2, "unit": "samples", "table": False, "peak_tflops": 1.0} | settings)


@pytest.mark.parametrize("logs", [True, False])
def test_the_page_has_curves_split_thresholds_and_manifest(tmp_path, logs):
    report = TrainingReport(pictures=False)
    logger = CSVLogger(tmp_path) if logs else None
    fit(tmp_path, throughput(), RunManifest(), report, logger=logger)
    assert report.path.parent == (tmp_path if not logs else type(tmp_path)(logger.log_dir))
    text = report.path.read_text()
    for part in ("Logging: training", "finished, 12 steps", "train_loss", "val_loss", "waiting for data", "&lt;= 5 %"):
        assert part in text, part
    assert "Thresholds" in text
    assert "What took effect" in text
    assert "&quot;torch&quot;" in text
    assert "not measured" not in text
    assert ("samples per second</figcaption>" in text) == logs  # those go to loggers
    points = re.search(r'points="([^"]+)"><title>train_loss', text).group(1).split()
    assert len(points) >= 6


def test_a_page_without_a_curve_says_why(tmp_path):
    for every, module, why in (
        (50, Logging(), "the fit ended after 12 steps, and log_every_n_steps is 50"),
        (2, Net(), "the module logged no number"),
    ):
        report = TrainingReport(pictures=False)
        fit(tmp_path, report, module=module, log_every_n_steps=every, limit_val_batches=0)
        assert why in report.path.read_text()


def test_it_needs_no_other_callback(tmp_path):
    report = TrainingReport(pictures=False)
    fit(tmp_path, report)
    text = report.path.read_text()
    assert "train_loss" in text
    assert "Thresholds" not in text


def test_the_page_has_the_best_metric_and_the_paths_of_checkpoints(tmp_path):
    report, best = (
        TrainingReport(pictures=False),
        ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_last=True),
    )
    other = ModelCheckpoint(tmp_path / "other", every_n_train_steps=5)
    fit(tmp_path, report, best, other)
    text = report.path.read_text()
    assert f"<b>{best.best_model_score:.4g}</b><span>best val_loss</span>" in text
    assert best.best_model_path
    assert other.best_model_path
    for path in (best.best_model_path, best.last_model_path, other.best_model_path):
        assert f"<td>{path}</td>" in text


def test_the_logger_gets_all_it_got_before_and_is_left_as_it_was(tmp_path):
    logged = []
    for callbacks in ([], [TrainingReport(pictures=False)]):
        logger = CSVLogger(tmp_path, name=str(len(callbacks)))
        fit(tmp_path, *callbacks, logger=logger)
        logged.append((tmp_path / str(len(callbacks)) / "version_0" / "metrics.csv").read_text())
        assert "log_metrics" not in vars(logger)
    assert logged[0] == logged[1]


def test_a_run_that_fails_has_its_report(tmp_path):
    class Failing(Logging):
        def training_step(self, batch, index):
            if self.global_step == 7:
                raise RuntimeError("the <disk> is full\nand more")
            return super().training_step(batch, index)

    report = TrainingReport(pictures=False)
    with pytest.raises(RuntimeError, match="disk"):
        fit(tmp_path, report, module=Failing())
    text = report.path.read_text()
    assert "failed, 7 steps" in text
    assert "RuntimeError: the &lt;disk&gt; is full</p>" in text


def test_a_copy_keeps_the_path(tmp_path):
    report = TrainingReport(pictures=False)
    assert pickle.loads(pickle.dumps(report)).path is None
    fit(tmp_path, report)
    for copy in (pickle.loads(pickle.dumps(report)), deepcopy(report)):
        assert copy.path == report.path == tmp_path / "report.html"


def test_no_page_is_written_over_another(tmp_path):
    report = TrainingReport(pictures=False)
    paths = []
    for _ in range(2):
        fit(tmp_path, report)
        paths.append(report.path.name)
    assert paths == ["report.html", "report-2.html"]


def test_pictures_lie_beside_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    report = TrainingReport()
    fit(tmp_path, throughput(), report)
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"curves-loss.png", "split.png"} <= names


def test_without_matplotlib_there_is_a_page_and_a_word(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lightning_ups.callbacks.logs.training_report.has", lambda _: False)
    report = TrainingReport()
    with caplog.at_level("INFO"):
        Trainer(logger=False, callbacks=[report], fast_dev_run=True, enable_progress_bar=False).fit(Net(), loader())
        assert "pip install matplotlib" not in caplog.text  # of a run that writes no page
        fit(tmp_path, report)
    assert "pip install matplotlib" in caplog.text
    assert report.path.exists()
    assert not (tmp_path / "report").exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    report = TrainingReport(pictures=False)
    with pytest.warns(UserWarning, match="another default_root_dir"):
        fit(tmp_path / "file" / "below", report)
    assert len(data()) == 8


def test_a_full_disk_leaves_no_half_page(tmp_path, monkeypatch):
    def full(path, *args, **kwargs):
        path.write_bytes(b"<!doctype")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    report, manifest = TrainingReport(pictures=False), RunManifest()
    with pytest.warns(UserWarning, match="another default_root_dir"):
        fit(tmp_path, report, manifest)
    assert (report.path, manifest.path) == (None, None)
    assert not [*tmp_path.rglob("*.html"), *tmp_path.rglob("manifest*")]


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_interrupted_run_has_its_speed_whichever_stands_first(tmp_path, first):
    class Interrupted(Logging):
        def training_step(self, batch, index):
            if self.global_step == 4:
                raise KeyboardInterrupt
            return super().training_step(batch, index)

    report, throughput = TrainingReport(pictures=False), TokenThroughput(warmup_steps=1, table=False)
    with pytest.raises(SystemExit):
        fit(tmp_path, *([report, throughput] if first else [throughput, report]), module=Interrupted())
    text = report.path.read_text()
    assert "interrupted, 4 steps" in text
    assert "samples per second" in text


def test_fast_dev_run_leaves_nothing(tmp_path):
    report = TrainingReport(pictures=False)
    fit(tmp_path, report, fast_dev_run=2, max_epochs=1)
    assert report.path is None
    assert not [*tmp_path.glob("*.html")]


class Insane(Net):
    def validation_step(self, batch, batch_idx):
        raise RuntimeError("a mistake in the sanity check")


def test_a_sanity_check_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, manifest = TrainingReport(pictures=False), RunManifest()
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer(tmp_path, callbacks=[manifest, report], num_sanity_val_steps=1).fit(Insane(), loader(), loader())
    assert (report.path, manifest.path) == (None, None)


class Tuned(Net):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.1, 4

    def train_dataloader(self):
        return loader(self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_trials_of_the_tuner_leave_the_names_to_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, manifest, throughput = TrainingReport(pictures=False), RunManifest(), TokenThroughput()
    run, model = trainer(tmp_path, callbacks=[throughput, manifest, report], epochs=20), Tuned()
    Tuner(run).lr_find(model, num_training=5)
    Tuner(run).scale_batch_size(model, max_trials=1, steps_per_trial=1)
    assert (report.path, manifest.path, throughput.summary) == (None, None, None)
    run.fit(model)
    assert (report.path.name, manifest.path.name) == ("report.html", "manifest.json")


class NoOptimizer(Logging):
    def configure_optimizers(self):
        raise RuntimeError("no optimizer")


class NoSetup(Callback):
    def setup(self, trainer, pl_module, stage):
        raise RuntimeError("no optimizer")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["before", "after"])
@pytest.mark.parametrize("by", [NoOptimizer, NoSetup])
def test_a_fit_that_fails_early_has_nothing_of_the_one_before(tmp_path, order, by):
    parts = [TrainingReport(pictures=False), throughput(), RunManifest()]
    callbacks, report = [parts[place] for place in order], parts[0]
    fit(tmp_path, *callbacks)
    first = report.path
    more = [NoSetup()] if by is NoSetup else []
    with pytest.raises(RuntimeError, match="no optimizer"):
        fit(tmp_path, callbacks[0], *more, *callbacks[1:], module=NoOptimizer())
    if report.path == first:  # the report itself heard nothing of a second fit
        return
    text = report.path.read_text()
    assert "waiting for data" not in text
    assert "failed, 0 steps" in text
    assert '"status": "finished"' not in text.replace("&quot;", '"')
    assert "&quot;model&quot;" not in text


def test_an_error_without_text_is_reported_by_its_class(tmp_path):
    class Failing(Logging):
        def training_step(self, batch, index):
            raise NotImplementedError

    report = TrainingReport(pictures=False)
    with pytest.raises(NotImplementedError):
        fit(tmp_path, report, module=Failing())
    assert "NotImplementedError</p>" in report.path.read_text()


def test_a_method_of_the_users_own_is_given_back_to_the_logger(tmp_path):
    logger, seen = CSVLogger(tmp_path), []
    logger.log_metrics = own = lambda metrics, step=None: seen.append(step)
    fit(tmp_path, TrainingReport(pictures=False), logger=logger)
    assert logger.log_metrics is own
    assert seen
