"""The command as users run it: processes, files, hangs and crashes."""

import json
import os
import time

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_ups.commands import diagnose
from lightning_ups.commands.diagnose import _Diagnosis, _last_lines, own_options
from tests.cli_toys import Toy
from tests.command import assert_short, folder, run, ups
from tests.commands.test_measured_fit import Cycled

__all__ = ["folder", "ups"]
HERE = "tests.commands.test_diagnose"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class Slow(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8)


class SlowData(LightningDataModule):
    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self):
        return DataLoader(Slow(), batch_size=4, num_workers=self.num_workers)

    val_dataloader = train_dataloader


class Breaks(Toy):
    """Ends or hangs the process when a batch is larger or smaller than usual."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def training_step(self, batch, index):
        if len(batch) != 4:
            if self.how == "crash":
                os._exit(3)
            time.sleep(1000)
        return super().training_step(batch, index)


@pytest.fixture
def quick(monkeypatch):
    """Let children import the tests."""
    monkeypatch.setenv("PYTHONPATH", ROOT)


def saving(**trainer):
    callback = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept", "every_n_train_steps": 3}}
    logger = [{"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}]
    return {"callbacks": [callback], "logger": logger, "limit_val_batches": 1.0, "enable_progress_bar": True} | trainer


@pytest.mark.slow  # other load on the machine looks like a problem
def test_a_slow_loader_is_named_its_fix_is_tried_and_no_file_is_left(ups, folder, quick):
    tree = run(data={"class_path": f"{HERE}.SlowData"}, trainer=saving())
    done = ups("diagnose", "--minutes", "1", "--json", "found.json", tree=tree)
    assert done.code == 0, done.err
    assert "The step waits for data" in done.out
    assert "tried once" in done.out
    assert "num_workers: " in done.out
    found = json.loads((folder / "found.json").read_text())
    assert found["findings"][0]["name"] == "slow loader"
    assert found["gain"] > 1.2
    assert not found["errors"]
    assert {path.name for path in folder.iterdir()} == {"run.yaml", "found.json"}


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"max_epochs": 2}, {"max_time": "00:00:00:01"}])
def test_user_code_sees_the_length_of_the_run_and_a_short_one_goes_on(ups, folder, monkeypatch, limit):
    monkeypatch.setattr(diagnose, "_leave", lambda trainer: None)  # this process
    spec = {"rows": str(folder / "rows"), "token": "x", "seconds": 0.1, "only_steps": True}
    (folder / "spec.json").write_text(json.dumps(spec))
    stopping = [{"class_path": "EarlyStopping", "init_args": {"monitor": "loss", "stopping_threshold": 1e9}}]
    trainer = {"max_epochs": None, "callbacks": stopping, **limit}
    tree = run(model={"class_path": "tests.commands.test_measured_fit.Cycled"}, trainer=trainer)
    done = ups("diagnose", "--probe", "spec.json", tree=tree)
    assert done.code == 0, done.err
    ends = [json.loads(line) for line in (folder / "rows").read_text().splitlines() if "end" in line]
    assert (ends[0]["end"], ends[0].get("error")) == ("steps", None)
    assert ends[0]["facts"]["steps"] >= 4
    seen = {"max_steps": (3, -1, 3), "max_epochs": (4, 2, -1), "max_time": (float("inf"), -1, -1)}
    assert Cycled.seen == seen[next(iter(limit))]


@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_the_module_neither_write_nor_end_the_run(ups, folder, monkeypatch):
    monkeypatch.setattr(diagnose, "_leave", lambda trainer: None)  # this process
    spec = {"rows": str(folder / "rows"), "token": "x", "seconds": 0.1, "only_steps": True}
    (folder / "spec.json").write_text(json.dumps(spec))
    tree = run(model={"class_path": "tests.commands.test_measured_fit.Bringing"})
    assert ups("diagnose", "--probe", "spec.json", tree=tree).code == 0
    assert not (folder / "precious").exists()
    assert '"shares"' in (folder / "rows").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "hang"])
def test_a_crash_or_a_hang_costs_one_row(folder, quick, monkeypatch, capsys, how):
    monkeypatch.setattr(diagnose, "_LIMIT_S", 8.0)
    (folder / "run.yaml").write_text(json.dumps(run(model={"class_path": f"{HERE}.Breaks", "init_args": {"how": how}})))
    diagnosis = _Diagnosis(["--config", "run.yaml"], minutes=0.5)
    diagnosis._began = time.time() + 170  # short experiments, and time for two processes to start
    diagnosis.run(tries_fix=False)
    assert [*diagnosis.errors] == ["batches"]
    assert {"steps", "parts", "bandwidth", "operators"} <= {*diagnosis.facts["done"]}
    diagnosis.show()
    assert "crashed or took too long" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"run.yaml"}


@pytest.mark.parametrize(
    ("gain", "tried", "said"),
    [
        (1.5, 1.8, "tried once: 1.50 times the mean speed of the runs without it"),
        (4.0, 1.8, "tried once: 4.00 times the mean speed of the runs without it, more than it explains"),
        (None, "failed: no memory", "gain not measured: failed: no memory"),
        (None, 1.8, "gain not known"),
        (None, None, "not tried"),
    ],
)
def test_a_fix_says_what_is_known_of_its_gain(capsys, gain, tried, said):
    diagnosis = _Diagnosis([], minutes=1)
    diagnosis.facts |= {"world_size": 1, "mean_s": 0.1, "shares": {"data": 0.6}, "batch_rows": 8, "compilations": 0}
    (first, *_) = diagnosis.found
    diagnosis.gain = gain
    diagnosis.trials = {} if tried is None else {f"fix: {first.name}": tried}
    diagnosis.show()
    assert f"Fix for {first.name} ({said}" in capsys.readouterr().out


def test_an_error_of_the_user_is_shown_in_one_line(ups, quick):
    tree = run(model={"class_path": "tests.cli_toys.Toy", "init_args": {"fail": "step"}})
    assert_short(ups("diagnose", "--minutes", "0.2", tree=tree), "No step was measured", "the user's own error")


@pytest.mark.gpu(count=2)
def test_a_slow_exchange_is_named_first(ups, folder, quick):
    injected = "tests.insight.diagnose.injectors"
    trainer = {"accelerator": "gpu", "devices": 2, "strategy": "ddp", "precision": "bf16-true"}
    tree = run(
        model={"class_path": f"{injected}.SlowExchange"}, data={"class_path": f"{injected}.SameData"}, trainer=trainer
    )
    done = ups("diagnose", "--minutes", "2", "--json", "found.json", tree=tree)
    assert done.code == 0, done.err
    found = json.loads((folder / "found.json").read_text())
    assert found["findings"][0]["name"] == "slow exchange"
    assert found["facts"]["collectives"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--minutes", "0"), "--minutes 0 is not a positive number"),
        (("--minutes", "-1"), "--minutes -1 is not"),
        (("--json", "/dev/null/found.json"), "--json /dev/null/found.json cannot be written"),
        (("--json", "."), "--json . cannot be written"),
    ],
)
def test_what_cannot_work_is_refused_before_an_experiment(ups, words, part):
    assert_short(ups("diagnose", *words, tree=run()), part)


def test_ranks_are_started_by_the_command_itself(ups, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert_short(ups("diagnose", tree=run()), "without torchrun")


def test_other_options_are_those_of_fit():
    own, rest = own_options(["--minutes", "2", "--config", "run.yaml", "--no_fix"])
    assert own == {"minutes": 2.0, "json": None, "fix": False, "probe": None}
    assert rest == ["--config", "run.yaml"]


def test_the_last_error_of_a_process_is_what_is_shown():
    assert _last_lines("Traceback\n  File\nKeyError: 'x'\n[rank0] bye\n") == "KeyError: 'x'"
    assert _last_lines("error: run.yaml:7: no.\n(--debug shows the traceback.)") == "run.yaml:7: no"
    assert _last_lines("") == "the process ended without a message"
