import subprocess
import sys

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.config.errors import constructor_error, report_errors, short_text, unwrapped
from lightning_ups.config.suggestions import suggest


def caught(function, *args, **kwargs):
    """The error of ``function``, as if this file had not called it."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


def module(name, code, **names):
    """What a module of that name defines by ``code``."""
    namespace = {"__name__": name, "__package__": name.rpartition(".")[0], **names}
    exec(code, namespace)
    return namespace


def test_ours_is_its_text():
    text = short_text(caught(ActivationCheckpoint, save="nonsense"))
    assert text.startswith("error: ")
    assert "nonsense" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, "a, b") for kind in (ValueError, TypeError, RuntimeError, ModuleNotFoundError, FileNotFoundError)),
        (ValueError, "one\n  two"),  # lines stay lines
        (AssertionError, None),
    ],
)
def test_kinds_of_ours(kind, text):
    fail = module("lightning_ups.x", "def fail(): raise kind(text)", kind=kind, text=text)["fail"]
    assert short_text(caught(fail)) == (text and f"error: {text}")


def users(*_, **__):
    raise ValueError("mine")
    yield


def refused(monitor="x"):
    EarlyStopping(monitor=monitor, mode="sideways")


CONSTRUCTS = "def instantiate_classes(): make()"
REFUSES = (
    "class MisconfigurationException(Exception): pass\ndef refuse(): raise MisconfigurationException('no test_step')"
)
LIGHTNING = module("lightning.pytorch.loops", REFUSES + "\ndef fail(): raise ValueError('no test_step')")


@pytest.mark.parametrize(
    "call",
    [
        lambda: next(users()),
        lambda: suggest(3, ["a"]),  # a defect of ours: raised by an operation, not by a `raise`
        lambda: suggest("a", users()),  # below ours
        lambda: LIGHTNING["refuse"](),  # a frame of another's lies between
        lambda: refused(),  # not where classes are made
        module("lightning.pytorch.cli", CONSTRUCTS, make=refused)["instantiate_classes"],  # a user's constructor
    ],
)
def test_what_keeps_its_traceback(call):
    assert short_text(caught(call)) is None


def test_what_lightning_refuses_is_short():
    make = module(
        "lightning.pytorch.cli", CONSTRUCTS.replace("make()", "make(monitor='x', mode='s')"), make=EarlyStopping
    )
    text = short_text(caught(make["instantiate_classes"]))
    assert text.startswith("error: EarlyStopping: `mode` can be min")
    assert short_text(caught(LIGHTNING["refuse"])) == "error: Lightning: no test_step"
    assert short_text(caught(LIGHTNING["fail"])) is None, "of another kind"


def test_a_metric_that_is_not_logged_is_short():
    class Logs:
        fast_dev_run = False
        callback_metrics = {"val_loss": torch.zeros(())}  # noqa: RUF012

    text = short_text(caught(EarlyStopping(monitor="val_los")._run_early_stopping_check, Logs()))
    assert text.startswith("error: Lightning: Early stopping conditioned on metric `val_los`")
    assert "`val_loss`" in text


def test_a_folder_that_lightning_cannot_make_is_short(tmp_path):
    below = tmp_path / "file" / "lightning_logs"
    (tmp_path / "file").touch()
    board = TensorBoardLogger(tmp_path / "file")
    text = short_text(caught(type(board).experiment.fget, board))
    assert str(below) in text.replace("\n  ", "")
    assert "trainer.default_root_dir" in text
    assert short_text(caught(lambda: below.mkdir())) is None, "it was not Lightning"


def test_methods_of_the_command_line_lie_around_a_run_and_not_within_it():
    code = "class LightningCLI:\n    def fit(self): Trainer().fit()\n"
    code += "class Trainer:\n    def fit(self, step=None): step() if step else refuse()"
    lightning = module("lightning.pytorch.cli", f"{REFUSES}\n{code}")

    class Mine(lightning["LightningCLI"]):
        def fit(self):
            super().fit()

    assert short_text(caught(Mine().fit)) == "error: Lightning: no test_step"

    class Within(Mine):
        def fit(self):
            lightning["Trainer"]().fit(lambda: lightning["refuse"]())

    assert short_text(caught(Within().fit)) is None, "a frame of the user's lies within the run"


def test_sigterm_is_no_success(capsys):
    def stop():
        raise SIGTERMException

    assert report_errors(stop, debug=False) == 143
    assert capsys.readouterr().err == "Terminated by SIGTERM.\n"


class Mine(Callback):
    def __init__(self, size: int = 1):
        raise KeyError("mine")


def test_what_the_parser_has_wrapped():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback", required=False)
    config = parser.parse_object({"callback": {"class_path": f"{__name__}.Mine"}})
    error = caught(parser.instantiate_classes, config)
    assert isinstance(unwrapped(error), KeyError)
    assert short_text(error) is None
    text = constructor_error(error)
    assert text.startswith("error: Mine: KeyError: 'mine'\n")
    assert __file__ in text
    assert text.count("  File") == 1


@pytest.mark.parametrize("kind", [str | Callback, Callback | str | None, list[str | Callback] | Callback])
def test_what_a_class_raised_of_the_types_that_a_setting_may_have(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=kind)
    path = "lightning_ups.callbacks.ActivationCheckpoint"
    config = parser.parse_object({"callback": {"class_path": path, "init_args": {"every_k": 0}}})
    error = caught(parser.instantiate_classes, config)
    assert "every_k=0" in short_text(error)
    assert "every_k=0" in str(unwrapped(error))


def test_each_rank_says_where_its_class_fails(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback", required=False)
    config = parser.parse_object({"callback": {"class_path": f"{__name__}.Mine"}})
    assert report_errors(lambda: parser.instantiate_classes(config), debug=False) == 1
    first, *frames = capsys.readouterr().err.splitlines()
    assert first == "[rank 1] error: Mine: KeyError: 'mine'"
    assert __file__ in frames[0]


def test_what_is_not_wrapped_stays():
    error = caught(Trainer, accelerator="cpu", devices=1, precision="nonsense")
    assert unwrapped(error) is error
    assert constructor_error(error) is None


def test_nothing_heavy_is_imported():
    code = "import sys; import lightning_ups.config.errors; assert not {'torch', 'lightning'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


PIPED = """
import sys
from lightning_ups.config.errors import report_errors
sys.stdin.read()  # until the reader has ended
def run():
    {body}
    return 0
sys.exit(report_errors(run, debug=False))
"""


@pytest.mark.parametrize(
    ("body", "closed"),
    [
        ("print('x' * 100_000)", "stdout"),
        ("import rich.console; rich.console.Console().print('x')", "stdout"),  # which ends by itself
        ("from lightning_ups.config import presets; presets.text('none of them')", "stderr"),
        ("raise KeyboardInterrupt", "stderr"),
    ],
)
def test_a_pipe_whose_reader_has_ended_is_141(body, closed):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [sys.executable, "-c", PIPED.format(body=body)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True, **pipes) as process:
        getattr(process, closed).close()
        process.stdin.close()
        other = process.stderr if closed == "stdout" else process.stdout
        assert other.read() == ""
        assert process.wait(60) == 141
