import csv
import json

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_ups.insight.compare.reading import best_times, read_run

ROWS = [{"step": step, "train_loss": 2.0 - step / 100, "epoch": 0} for step in range(0, 50, 5)]


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*dict.fromkeys(name for row in rows for name in row)])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def with_column(name, values):
    return [row | {name: value} for row, value in zip(ROWS, values, strict=True)]


def test_a_folder_of_the_csv_logger(tmp_path):
    later = [{"step": 45, "train_loss": "", "val_loss": 1.5}]  # Lightning writes validation into a row of its own
    write_csv(tmp_path / "metrics.csv", [*ROWS, *later])
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\nkind: !!python/name:torch.nn.GELU ''\n")
    run = read_run(str(tmp_path))
    assert [*run.series] == ["train_loss", "val_loss"]
    assert run.series["train_loss"].steps.tolist() == [row["step"] for row in ROWS]
    assert run.series["val_loss"].values.tolist() == [1.5]
    assert run.settings["lr"] == 0.1
    assert "GELU" in run.settings["kind"]
    assert run.times == {}


@pytest.mark.parametrize(
    ("name", "values", "seconds"),
    [
        ("step_time", np.full(10, 0.2), 0.2),
        ("train/step_time_ms", np.full(10, 200.0), 0.2),
        ("iter_time_s", np.full(10, 0.2), 0.2),
        ("seconds_per_step", np.full(10, 0.2), 0.2),
        ("time", np.full(10, 0.2), 0.2),
        ("time", 7 + np.arange(10.0), 0.2),
        ("train|time", np.arange(10.0), 0.2),
        ("_timestamp", 1.7e9 + np.arange(10.0), 0.2),
    ],
)
def test_step_times_are_found_by_the_name_of_their_column(tmp_path, name, values, seconds):
    run = read_run(write_csv(tmp_path / "log.csv", with_column(name, values)))
    (times,) = run.times.values()
    assert times.values == pytest.approx(seconds)
    assert [*run.series] == ["train_loss"]


@pytest.mark.parametrize("name", ["batch", "step_loss", "batch_size", "iters", "timeouts"])
def test_other_columns_are_no_times(tmp_path, name):
    assert read_run(write_csv(tmp_path / "log.csv", with_column(name, np.arange(10.0)))).times == {}


def test_a_column_may_be_named(tmp_path):
    path = write_csv(tmp_path / "log.csv", with_column("dt", np.full(10, 0.2)))
    assert read_run(path, time="dt").times["a column"].values == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"log.csv has no column 'd' \(--time\), but train_loss, epoch, dt"):
        read_run(path, time="d")


def test_a_clock_at_validation_does_not_count(tmp_path):
    rows = [{"step": step, "_runtime": 2.0 * step, "loss": 1} for step in range(10)]
    rows.insert(6, {"step": 5, "_runtime": 900.0, "val_loss": 1})
    run = read_run(write_csv(tmp_path / "log.csv", rows))
    assert run.times["a clock"].values == pytest.approx(2.0)


def test_a_folder_with_tensorboard_events(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(10):
            writer.add_scalar("train_loss", 2 - step / 10, step, walltime=1e9 + step / 4)
            writer.add_scalar("throughput/step_ms", 200.0, step, walltime=1e9 + step / 4)
    for given in (str(tmp_path), str(next(tmp_path.glob("events*")))):
        run = read_run(given)
        assert run.series["train_loss"].values == pytest.approx(2 - np.arange(10) / 10)
        assert run.times["a clock"].values == pytest.approx(0.25)
        assert run.times["throughput/step_ms"].values == pytest.approx(0.2)


def test_exports_of_wandb(tmp_path):
    chart = [{"Step": row["step"], "sweet-sun-1 - train_loss": 1, "sweet-sun-1 - train_loss__MIN": 1} for row in ROWS]
    assert [*read_run(write_csv(tmp_path / "chart.csv", chart)).series] == ["train_loss"]
    two = [{"Step": 1, "a - loss": 1, "b - loss": 2}]
    with pytest.raises(ValueError, match=r"holds 2 runs: a, b\. Export one run"):
        read_run(write_csv(tmp_path / "two.csv", two))
    history = [{"_step": i, "trainer/global_step": 10 * i, "loss": 1.0, "_runtime": 2.0 * i} for i in range(9)]
    (tmp_path / "rows.json").write_text(json.dumps(history))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, history)))
    columns = {name: {str(i): row[name] for i, row in enumerate(history)} for name in history[0]}
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    for path in ("rows.json", "lines.jsonl", "columns.json"):
        run = read_run(str(tmp_path / path))
        assert run.series["loss"].steps.tolist() == [10 * i for i in range(9)]
        assert run.times["a clock"].values == pytest.approx(0.2)


def manifest(**facts):
    return {"schema": 1, "run": {"kind": "fit", "started": "1"}, "seed": 1, "report": {"TokenThroughput": facts}}


def test_a_folder_of_this_package(tmp_path):
    write_csv(tmp_path / "metrics.csv", with_column("throughput/step_ms", np.full(10, 300.0)))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(step_s=0.5, step_times="step_times.csv")))
    (tmp_path / "manifest-2.json").write_text(json.dumps({"run": {"kind": "validate"}}))
    write_csv(tmp_path / "step_times.csv", [{"step": step, "step_ms": 250.0} for step in range(10, 50)])
    write_csv(tmp_path / "step_times-2.csv", [{"step": step, "step_ms": 1.0} for step in range(10, 50)])
    run = read_run(str(tmp_path))
    assert run.settings == {"seed": 1}
    assert {name: each.values[0] for name, each in run.times.items()} == {
        "step_times.csv": 0.25,
        "throughput/step_ms": 0.3,
        "the manifest": 0.5,
    }
    assert best_times([run]) == "step_times.csv"
    write_csv(tmp_path / "metrics.csv", with_column("dt", np.full(10, 0.1)))
    assert [*read_run(str(tmp_path), time="dt").times] == ["a column"]
    assert read_run(str(tmp_path / "manifest-2.json")).manifest == {"run": {"kind": "validate"}}


@pytest.mark.parametrize("text", ["step,step_ms\n", "", "a,b\n1,2\n", "step,step_ms\n3,\n"])
def test_step_times_without_rows_are_not_used(tmp_path, text):
    write_csv(tmp_path / "metrics.csv", with_column("throughput/step_ms", np.full(10, 300.0)))
    (tmp_path / "step_times.csv").write_text(text)
    run = read_run(str(tmp_path))
    assert [*run.times] == ["throughput/step_ms"]
    (note,) = run.notes
    assert "step_times.csv is not used" in note


def test_metrics_without_rows_are_not_used(tmp_path):
    write_csv(tmp_path / "step_times.csv", [{"step": step, "step_ms": 250.0} for step in range(50)])
    (tmp_path / "metrics.csv").write_text("step,train_loss\n")
    run = read_run(str(tmp_path))
    assert [*run.times] == ["step_times.csv"]
    (note,) = run.notes
    assert "metrics.csv is not used" in note
    for path in (tmp_path / "metrics.csv", write_csv(tmp_path / "rows.csv", [{"step": ""}])):
        with pytest.raises(ValueError, match="has no rows"):
            read_run(str(path))
    (tmp_path / "step_times.csv").unlink()
    with pytest.raises(ValueError, match=r"metrics\.csv is not used"):
        read_run(str(tmp_path))


def test_errors_name_the_file_and_the_fix(tmp_path):
    def refused(path):
        with pytest.raises(ValueError, match=str(path)) as caught:
            read_run(str(path))
        return str(caught.value)

    write_csv(tmp_path / "logs/version_0/metrics.csv", ROWS)
    write_csv(tmp_path / "logs/version_1/metrics.csv", ROWS)
    assert f"such as {tmp_path}/logs/version_1." in refused(tmp_path / "logs")
    assert "does not exist" in (said := refused(tmp_path / "logs/version_2"))
    assert "has: version_0, version_1" in said
    (tmp_path / "empty").mkdir()
    assert "Name a run's folder." in refused(tmp_path / "empty")
    assert "has no column of steps, but a, b" in refused(write_csv(tmp_path / "other.csv", [{"a": 1, "b": 2}]))
    (tmp_path / "torn.json").write_text('[{"step":')
    assert "is not JSON" in refused(tmp_path / "torn.json")
    (tmp_path / "number.json").write_text("3")
    assert "has no rows" in refused(tmp_path / "number.json")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in refused(tmp_path / "bytes.csv")
    (tmp_path / "yaml").mkdir()
    write_csv(tmp_path / "yaml/metrics.csv", ROWS)
    (tmp_path / "yaml/hparams.yaml").write_text("a: [")
    assert "hparams.yaml is not YAML" in refused(tmp_path / "yaml")
