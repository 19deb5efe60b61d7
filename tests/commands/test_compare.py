"""`compare` on files, and on two real runs."""

import json
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ups.callbacks import RunManifest, TokenThroughput
from lightning_ups.commands import compare
from tests.command import assert_short, folder, ups  # noqa: F401
from tests.insight.compare.synthetic import losses, run, step_times
from tests.toys import Net, trainer

pytestmark = pytest.mark.usefixtures("folder")


def write(path, *, times=None, loss=None, every=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: each for name, each in (("step_time_s", times), ("train_loss", loss)) if each is not None}
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    lines = [f"{every * step},{row}" for step, row in enumerate(rows)]
    path.write_text("\n".join([",".join(["step", *columns]), *lines]) + "\n")


@pytest.fixture
def logs(folder):  # noqa: F811
    """Four runs of Lightning's CSVLogger: two alike, one 3 % slower, one with another loss."""
    for index, (factor, end) in enumerate(((1, 2.0), (1, 2.0), (1.03, 2.0), (1, 2.5))):
        path = folder / f"lightning_logs/version_{index}/metrics.csv"
        write(path, times=factor * step_times(index), loss=losses(index, count=600, end=end))
        path.with_name("hparams.yaml").write_text(f"lr: 0.{index}\nwidth: 8\n")
    return "lightning_logs/version_{}".format


@pytest.fixture
def rotated(folder):  # noqa: F811
    """Two runs whose typical step grows by 35 % while most steps become 10 % faster."""
    for name, cycle in (("a.csv", (1, 2, 3)), ("b.csv", (3, 1.8, 2.7))):
        write(folder / name, times=np.tile(cycle, 200), loss=np.full(600, 1.0))
    return "a.csv", "b.csv"


def row(out, name):
    return next(line.split() for line in out.splitlines() if line.strip().startswith(name))


def test_runs_that_only_have_csv_logs(ups, logs):  # noqa: F811
    done = ups("compare", logs(0), logs(1), logs(2))
    assert done.code == 0, done.err
    same, slower = done.out.split("Effect of ")[1:]
    assert same.startswith("version_1 against version_0")
    assert "noise" in row(same, "step time, typical")
    assert "significant" in row(slower, "step time, typical")
    assert row(done.out, "lr") == ["lr", "0.0", "0.1", "0.2"]
    assert "width" not in done.out
    assert "One run per side" in done.out
    assert not {"\x1b", "│", "━"} & {*done.out}  # plain text in a pipe


def test_the_loss_is_compared_over_its_last_steps(ups, logs):  # noqa: F811
    out = ups("compare", logs(0), logs(3)).out
    assert "beyond batch noise" in " ".join(row(out, "train_loss"))


def test_a_row_says_when_its_two_values_differ_otherwise_than_matched_steps(ups, logs, rotated):  # noqa: F811
    out = ups("compare", *rotated).out
    found = " ".join(row(out, "step time, typical"))
    assert "2 s 2.7 s -10.0 %" in found
    assert found.endswith("from a column; at matched steps, while the runs' averages differ by +35 %")
    assert "matched steps" not in " ".join(row(out, "step time, mean"))
    assert "matched steps" not in ups("compare", logs(0), logs(1), logs(2)).out


def test_groups_of_runs(ups, logs):  # noqa: F811
    done = ups("compare", logs(0), logs(1), "vs", logs(2), logs(3))
    assert done.code == 0, done.err
    assert "Effect of version_2 and 1 more against version_0 and 1 more" in done.out
    assert "One run per side" not in done.out


def test_json_and_html(ups, logs, folder):  # noqa: F811
    assert ups("compare", logs(0), logs(2), "--json", "found.json", "--html", "found.html").code == 0
    found = json.loads((folder / "found.json").read_text())
    assert found["runs"] == {"version_0": [logs(0)], "version_2": [logs(2)]}
    assert found["settings"] == {"lr": [0.0, 0.2]}
    step = found["effects"]["version_2"][0]
    assert step["verdict"] == "significant"
    assert step["difference"]["low"] < 0.03 < step["difference"]["high"]
    html = (folder / "found.html").read_text()
    assert html.count("<svg") == 2  # step time and loss
    assert "version_2 against version_0" in html
    assert "<script" not in html


def test_a_terminal_gets_a_table(logs, monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setattr(compare, "Console", lambda **_: Console(force_terminal=True, width=200))
    assert compare.main([logs(0), logs(2)]) == 0
    assert "\x1b[1;33m" in capsys.readouterr().out  # what is significant is bold


def test_errors_are_short(ups, logs, folder):  # noqa: F811
    assert_short(ups("compare", logs(0)), "compare takes at least two runs")
    assert_short(ups("compare", logs(0), logs(7)), "version_7 does not exist", "has: version_0")
    assert_short(ups("compare", logs(0), "lightning_logs"), "lightning_logs has no metrics.csv", logs(3))
    assert_short(ups("compare", logs(0), "vs"), "'vs' stands between runs")
    assert_short(ups("compare", logs(0), logs(0)), "version_0 is given twice")
    assert_short(ups("compare", logs(0), logs(1), "--jsn", "x"), "Did you mean '--json'?")
    assert_short(ups("compare", logs(0), logs(1), "--json", "none/x.json"), "none/x.json", "cannot be written")
    assert_short(ups("compare", logs(0), logs(1), "--time", "dt"), "has no column 'dt'")


def test_runs_that_have_names_are_shown_by_them(monkeypatch):
    def named(path, *, time):
        return replace(run(path, loss=losses(0)), title="" if path == "plain" else path.rpartition("/")[2])

    monkeypatch.setattr(compare, "read_run", named)
    for runs, names in (
        (["1/7f/slow", "1/8a/fast"], ["slow", "fast"]),
        (["1/7f/same", "1/8a/same"], ["7f/same", "8a/same"]),
        (["1/7f/slow", "plain"], ["1/7f/slow", "plain"]),
        (["7f/slow", "7f/b", "vs", "8a/fast", "8a/b"], ["slow and 1 more", "fast and 1 more"]),
    ):
        assert [side.name for side in compare.sides_of(Namespace(runs=runs, time=None))] == names


def notes(done):
    """Return the lines below the tables."""
    assert done.code == 0, done.err
    return done.out.rpartition("\n\n")[0].partition("Effect of")[2].split("\n\n")[1:] + done.out.split("\n\n")[-1:]


def test_long_heads_are_shortened_and_the_whole_name_stands_below(ups, logs, folder):  # noqa: F811
    long = f"mlruns/1/{'0123456789abcdef' * 2}"
    (folder / long).mkdir(parents=True)
    (folder / logs(0) / "metrics.csv").rename(folder / long / "metrics.csv")
    out = ups("compare", long, logs(1)).out
    head = next(line.split() for line in out.splitlines() if "verdict" in line)
    assert head[:2] == [f"…{long[-29:]}", "lightning_logs/version_1"]
    assert f"\n…{long[-29:]} is {long}\n" in out
    alike = [f"{side}{'/x' * 20}" for side in "ab"]
    assert [*compare._heads(alike).values()] == alike


def test_notes_take_one_line_each_and_fit_the_runs(ups, logs, folder):  # noqa: F811
    def noted(*words):
        lines = [line for note in notes(ups("compare", *words)) for line in note.strip().splitlines()]
        assert all(len(line) <= 200 for line in lines)
        return lines

    (alone,) = noted(logs(0), logs(1))
    assert alone.startswith("One run per side")
    (mixed,) = noted(logs(0), "vs", logs(1), logs(2))
    assert mixed.startswith("version_0 is one run")
    (folder / logs(0) / "hparams.yaml").unlink()
    (folder / logs(1) / "step_times.csv").write_text("step,step_ms\n")
    assert noted(logs(0), logs(1))[1:] == [
        "Settings are not compared: lightning_logs/version_0 has no manifest.json, hparams.yaml or config.yaml.",
        "lightning_logs/version_1/step_times.csv is not used: it has no row with a step and its step_ms.",
    ]
    (folder / logs(1) / "manifest.json").write_text(json.dumps({"run": {"kind": "fit"}, "seed": 1}))
    assert noted(logs(1), logs(2))[1].startswith("Settings are not compared: lightning_logs/version_1 has a manifest")


def test_runs_without_a_common_step_or_metric(ups, folder):  # noqa: F811
    for name, first, loss in (("a", 0, "train_loss"), ("b", 100, "train_loss"), ("c", 0, "loss")):
        lines = [f"{step},{2 + step % 2}" for step in range(first, first + 50)]
        (folder / f"{name}.csv").write_text("\n".join([f"step,{loss}", *lines]) + "\n")
    done = ups("compare", "a.csv", "b.csv")
    assert "no step in common" in " ".join(row(done.out, "train_loss"))
    assert "No step in common: train_loss" in done.out
    assert "fewer than 8" not in done.out
    assert "Step times are not compared: a.csv has none" in done.out
    done = ups("compare", "a.csv", "c.csv")
    assert "No metric in common: a.csv has train_loss, c.csv has loss." in done.out


@pytest.mark.parametrize("command", ["compare", "gate"])
def test_a_fit_is_not_compared_with_a_validation(ups, logs, folder, command):  # noqa: F811
    for index, kind in enumerate(("fit", "validate")):
        (folder / logs(index) / "manifest.json").write_text(json.dumps({"run": {"kind": kind}}))
    assert_short(ups(command, logs(0), logs(1)), f"{logs(1)} is a run of `validate`, but {logs(0)} of `fit`")


class Logged(Net):
    @override
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train_loss", loss)
        return loss


def test_two_real_runs(ups, folder):  # noqa: F811
    seed_everything(0)
    data = torch.randn(60, 8)
    for index in range(2):
        made = trainer(
            folder,
            callbacks=[TokenThroughput(unit="samples", warmup_steps=5, table=False), RunManifest()],
            logger=CSVLogger(folder, name="logs"),
            epochs=1,
            log_every_n_steps=2,
            gradient_clip_val=[None, 100.0][index],
        )
        made.fit(Logged(), DataLoader(data, batch_size=1))
    done = ups("compare", "logs/version_0", "logs/version_1", "--json", "found.json")
    assert done.code == 0, done.err
    assert "from step_times.csv" in done.out
    found = json.loads((folder / "found.json").read_text())
    assert found["settings"]["training/gradient_clip_val"] == [None, 100.0]
    assert not [name for name in found["settings"] if "TokenThroughput" in name or name.startswith("run/")]
    by_name = {effect["name"]: effect for effect in found["effects"]["version_1"]}
    assert by_name["train_loss"]["verdict"] == "identical"
    assert by_name["step time, typical"]["points"] == 49  # 60, less 5 and the first tenth of the rest
    assert np.isfinite(by_name["step time, mean"]["difference"]["low"])
    assert "throughput/samples_per_s" in by_name
