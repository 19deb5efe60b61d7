"""Run the command line in this process, since a start takes seconds, and look at what it prints."""

import contextlib
import io
import traceback
import warnings
from dataclasses import dataclass

import pytest
import yaml

from lightning_ups.__main__ import main
from tests.cli_toys import Noted

MODEL = {"class_path": "tests.cli_toys.Toy"}
DATA = {"class_path": "tests.cli_toys.Data"}
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> list[str]:
        """What is printed about the error, without what comes before it."""
        lines = self.err.splitlines()
        return lines[next(index for index, line in enumerate(lines) if line.startswith("error:")) :]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set by the command line, and put back with this
    Noted.seen.clear()
    return tmp_path


@pytest.fixture
def ups(folder):
    """Run a command as ``python -m lightning_ups`` does, with ``run.yaml`` if a tree is given."""

    def ups(*words, tree=None):
        if tree is not None:
            text = tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False)
            (folder / "run.yaml").write_text(text)
            words = (*words, "--config", "run.yaml")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice is not what is tested
            try:
                code = main(words)
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:  # noqa: BLE001  (as Python does)
                traceback.print_exc()
                code = 1
        return Outcome(code, out.getvalue(), err.getvalue())

    return ups


def run(**sections):
    trainer = QUIET | sections.pop("trainer", {})
    return {"model": MODEL, "data": DATA, "trainer": trainer} | sections


def noted(**sections):
    trainer = sections.pop("trainer", {})
    callbacks = [*trainer.pop("callbacks", []), {"class_path": "tests.cli_toys.Noted"}]
    return run(trainer=trainer | {"callbacks": callbacks}, **sections)


def config(outcome):
    assert outcome.code == 0, outcome.err
    return yaml.safe_load(outcome.out)


def assert_short(done, *parts, most=6):
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    lines = done.error
    assert len(lines) <= most
    assert lines[-1] == "(--debug shows the traceback.)"
    text = " ".join(" ".join(lines).split())
    for part in parts:
        assert part in text
