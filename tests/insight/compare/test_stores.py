import sqlite3
from contextlib import closing
from math import inf, isnan

import pytest
import wandb

from lightning_ups.callbacks import RunManifest, TokenThroughput
from lightning_ups.insight.compare.reading import read_run
from tests.insight.report.test_run_files import fit, mlflow_logger, wandb_logger

ID = "0123456789abcdef" * 2
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)


def whole(folder):
    """Read a run, and check that it has what lies in one folder and in the other."""
    run = read_run(str(folder))
    assert run.manifest["run"]["status"] == "finished"
    assert {"step_times.csv", "throughput/step_ms"} <= run.times.keys()
    assert {"loss/train", "throughput/samples_per_s"} <= run.series.keys()
    assert "_step" not in run.series
    return run


def test_both_folders_of_a_run_of_wandb(tmp_path):
    fit(tmp_path, wandb_logger(tmp_path), RunManifest(), TokenThroughput(warmup_steps=1))
    wandb.finish()
    wandb.teardown()  # waits until the file is written
    logs = tmp_path / "wandb-logs"
    (ours,) = logs.glob("project/*")
    (theirs,) = logs.glob("wandb/offline-run-*")
    first, second = whole(ours), whole(theirs)
    assert first.settings == second.settings == whole(next(theirs.glob("*.wandb"))).settings
    assert read_run(str(theirs / "files" / "manifest.json")).series.keys() == first.series.keys()
    with pytest.raises(ValueError, match=r"Name one of its runs, such as .*wandb/offline-run-"):
        read_run(str(logs))
    (ours / "manifest.json").unlink()
    assert read_run(str(theirs)).manifest == second.manifest  # the copy


def test_a_run_in_files_of_mlflow(tmp_path):
    fit(tmp_path, mlflow_logger(tmp_path), RunManifest(), TokenThroughput(warmup_steps=1))
    (run,) = (path.parent for path in (tmp_path / "mlruns").glob("*/*/artifacts"))
    found = whole(run)
    assert read_run(str(run / "artifacts")).settings == found.settings
    assert found.title == (run / "tags" / "mlflow.runName").read_text() != ""
    for path in run.rglob("manifest.json"):
        path.unlink()
    assert read_run(str(run)).settings["manifest/versions/torch"]  # of the parameters


def test_a_run_in_a_database_of_mlflow(tmp_path):
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as base:
        base.execute("CREATE TABLE metrics (key, value FLOAT, timestamp BIGINT, run_uuid, step BIGINT, is_nan BOOLEAN)")
        base.execute("CREATE TABLE params (key, value, run_uuid)")
        base.execute("CREATE TABLE runs (run_uuid, name, experiment_id, start_time)")
        base.execute("INSERT INTO runs VALUES (?, 'lr0.1', 1, 7)", (ID,))
        rows = [("loss", 1 / (1 + step), 1000 * step, ID, step, False) for step in range(5)]
        rows += [("loss", 0, 5000, ID, 5, True), ("loss", -1.7976931348623157e308, 6000, ID, 6, False)]
        rows += [("loss", 7, 0, "another", 0, False)]
        base.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
        base.execute("INSERT INTO params VALUES ('lr', '0.1', ?)", (ID,))
        base.commit()
    (tmp_path / "not.db").write_bytes(b"\xff no database")
    with pytest.raises(ValueError, match="not a text file"):
        read_run("not.db")
    for place in (tmp_path / "1" / ID, tmp_path / "mlruns" / "1" / ID / "artifacts"):
        place.mkdir(parents=True)
    (tmp_path / "1" / ID / "manifest.json").write_text('{"schema": 1, "lr": 0.1}')
    for folder in ("1", "mlruns/1"):
        run = read_run(f"{folder}/{ID}")
        *first, sixth, last = run.series["loss"].values
        assert first == [1 / (1 + step) for step in range(5)]
        assert isnan(sixth)
        assert last == -inf
        assert run.settings["lr"] == 0.1
        assert run.title == "lr0.1"
        assert run.times["a clock"].values == pytest.approx(1)
    with pytest.raises(ValueError, match=rf"mlflow\.db is a database of MLflow.* It has 1: {tmp_path}/1/{ID}\."):
        read_run(str(tmp_path / "mlflow.db"))
    (tmp_path / "mlflow.db").unlink()
    (note,) = read_run(f"1/{ID}").notes
    assert "start compare in the folder of mlflow.db" in note
