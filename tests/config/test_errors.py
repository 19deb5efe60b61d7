import subprocess
import sys
import traceback

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessRaisedException

from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.config.errors import report_errors, short_text, unwrapped
from lightning_ups.config.layers import read
from lightning_ups.config.suggestions import suggest


def caught(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_ours_is_its_text():
    text = short_text(caught(ActivationCheckpoint, save="nonsense"))
    assert text is not None
    assert text.startswith("error: ")
    assert "nonsense" in text
    assert max(map(len, text.splitlines())) <= 100


def test_lines_stay_lines():
    namespace = {"__name__": "lightning_ups.x", "__package__": "lightning_ups"}
    exec("def fail(): raise ValueError('one\\n  two')", namespace)
    assert short_text(caught(namespace["fail"])) == "error: one\n  two"


def test_a_users_error_keeps_its_traceback():
    def fail():
        raise ValueError("mine")

    assert short_text(caught(fail)) is None


def test_a_defect_of_ours_keeps_its_traceback():
    # Raised in a frame of ours, but by an operation, not by a `raise`.
    assert short_text(caught(suggest, 3, ["a"])) is None


def test_an_error_below_ours_keeps_its_traceback():
    # Torch's, or the user's, called by us: no text of ours explains it.
    def names():
        raise ValueError("mine")
        yield

    assert short_text(caught(suggest, "a", names())) is None


def test_lightning_refusing_a_setting_in_fit_keeps_its_traceback():
    assert short_text(caught(EarlyStopping, monitor="x", mode="sideways")) is None


def test_lightning_refusing_a_setting_at_construction_is_short():
    exec_globals = {"__name__": "lightning.pytorch.cli", "EarlyStopping": EarlyStopping}
    exec("def instantiate_classes(): EarlyStopping(monitor='x', mode='sideways')", exec_globals)
    error = without_this_frame(caught(exec_globals["instantiate_classes"]))
    text = short_text(error)
    assert text is not None
    assert text.startswith("error: EarlyStopping: `mode` can be min")


def test_a_users_constructor_between_keeps_the_traceback():
    class Mine(Callback):
        def __init__(self):
            EarlyStopping(monitor="x", mode="sideways")

    exec_globals = {"__name__": "lightning.pytorch.cli", "Mine": Mine}
    exec("def instantiate_classes(): Mine()", exec_globals)
    assert short_text(without_this_frame(caught(exec_globals["instantiate_classes"]))) is None


def test_what_lightning_calls_a_misconfiguration_is_short():
    namespace = {"__name__": "lightning.pytorch.loops", "__package__": "lightning.pytorch"}
    exec("class MisconfigurationException(Exception): pass", namespace)
    exec("def run(): raise MisconfigurationException('no test_step')", namespace)
    error = caught(namespace["run"])
    assert short_text(error) is None, "a frame of another's lies between"
    assert short_text(without_this_frame(error)) == "error: Lightning: no test_step"
    exec("def run(): raise ValueError('no test_step')", namespace)
    assert short_text(without_this_frame(caught(namespace["run"]))) is None, "of another kind"


def test_a_metric_that_is_not_logged_is_short():
    class Logs:
        fast_dev_run = False
        callback_metrics = {"val_loss": torch.zeros(())}  # noqa: RUF012

    error = without_this_frame(caught(EarlyStopping(monitor="val_los")._run_early_stopping_check, Logs()))
    text = short_text(error)
    assert text is not None
    assert text.startswith("error: Lightning: Early stopping conditioned on metric `val_los`")
    assert "`val_loss`" in text


def test_a_folder_that_lightning_cannot_make_is_short(tmp_path):
    below = tmp_path / "file" / "lightning_logs"
    (tmp_path / "file").touch()
    board = TensorBoardLogger(tmp_path / "file")
    text = short_text(without_this_frame(caught(type(board).experiment.fget, board)))
    assert text is not None
    assert str(below) in text.replace("\n  ", "")
    assert "trainer.default_root_dir" in text
    assert short_text(caught(below.mkdir)) is None, "it was not Lightning"


def test_sigterm_is_no_success(capsys):
    def stop():
        raise SIGTERMException

    assert report_errors(stop, debug=False) == 143
    assert capsys.readouterr().err == "Terminated by SIGTERM.\n"


def without_this_frame(error):
    return error.with_traceback(error.__traceback__.tb_next)


def test_what_the_parser_has_wrapped():
    class Mine(Callback):
        def __init__(self, size: int = 1):
            raise KeyError("mine")

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback", required=False)
    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    config = parser.parse_object({"callback": {"class_path": f"{__name__}.Mine"}})
    error = caught(parser.instantiate_classes, config)
    root = unwrapped(error)
    assert isinstance(root, KeyError)
    assert short_text(error) is None


@pytest.mark.parametrize("kind", [str | Callback, Callback | str | None, list[str | Callback] | Callback])
def test_what_a_class_raised_of_the_types_that_a_setting_may_have(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=kind)
    path = "lightning_ups.callbacks.ActivationCheckpoint"
    config = parser.parse_object({"callback": {"class_path": path, "init_args": {"every_k": 0}}})
    error = caught(parser.instantiate_classes, config)
    text = short_text(error)
    assert text is not None, "the parser had another type in mind"
    assert "every_k=0" in text
    assert "every_k=0" in str(unwrapped(error))


def test_what_is_not_wrapped_stays():
    error = caught(Trainer, accelerator="cpu", devices=1, precision="nonsense")
    assert unwrapped(error) is error


def test_nothing_heavy_is_imported():
    code = "import sys; import lightning_ups.config.errors; assert not {'torch', 'lightning'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, ModuleNotFoundError, FileNotFoundError])
def test_kinds_of_ours(kind):
    namespace = {"__name__": "lightning_ups.x", "__package__": "lightning_ups", "kind": kind}
    exec("def fail(): raise kind('what, why, cure')", namespace)
    assert short_text(caught(namespace["fail"])) == "error: what, why, cure"


def test_another_kind_is_no_explanation():
    namespace = {"__name__": "lightning_ups.x", "__package__": "lightning_ups"}
    exec("def fail(): raise AssertionError('broken')", namespace)
    assert short_text(caught(namespace["fail"])) is None


def spawned(function, *args, **kwargs):
    """The error that the first process gets where ``function`` raises one in a process that torch has spawned."""
    said = "".join(traceback.format_exception(caught(function, *args, **kwargs)))
    return ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{said}", 1, 1234)


def test_ours_is_its_text_from_another_process():
    assert short_text(spawned(ActivationCheckpoint, save="nonsense")) == short_text(
        caught(ActivationCheckpoint, save="nonsense")
    )


def test_lines_stay_lines_from_another_process():
    error = spawned(ActivationCheckpoint, save="one\n  two\nthree")
    text = short_text(error)
    assert text is not None
    assert text == short_text(caught(ActivationCheckpoint, save="one\n  two\nthree"))


def test_what_is_not_ours_keeps_its_traceback_from_another_process():
    def mine():
        raise ValueError("mine")

    def names():
        raise ValueError("mine")
        yield

    def after_ours():
        try:
            ActivationCheckpoint(save="nonsense")
        except ValueError:
            raise KeyError("mine") from None

    assert short_text(spawned(mine)) is None
    assert short_text(spawned(after_ours)) is None
    assert short_text(spawned(suggest, 3, ["a"])) is None, "a defect of ours"
    assert short_text(spawned(suggest, "a", names())) is None, "below ours"
    assert short_text(ProcessRaisedException("killed", 0, 1)) is None


def test_ours_after_another_is_the_last(tmp_path):
    (tmp_path / "run.yaml").write_text("a: [\n")
    text = short_text(spawned(read, str(tmp_path / "run.yaml"), command="fit"))
    assert text is not None
    assert "run.yaml" in " ".join(text.split())
    assert "Traceback" not in text


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
        ("print('x' * 100_000, file=sys.stderr)", "stderr"),
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
        said = other.read()
        code = process.wait(60)
    assert code == 141
    assert said == ("")


def test_methods_of_the_command_line_lie_around_a_run_and_not_within_it():
    lightning = {"__name__": "lightning.pytorch.cli", "__package__": "lightning.pytorch"}
    exec(
        "class MisconfigurationException(Exception): pass\n"
        "class Trainer:\n"
        "    def fit(self, step=None): return step() if step else refuse()\n"
        "def refuse(): raise MisconfigurationException('no test_step')\n"
        "class LightningCLI:\n"
        "    def __init__(self): self._run_subcommand()\n"
        "    def _run_subcommand(self): self.before_fit(), self.fit()\n"
        "    def before_fit(self): pass\n"
        "    def fit(self): Trainer().fit()\n",
        lightning,
    )

    class Mine(lightning["LightningCLI"]):
        def __init__(self):
            super().__init__()

        def _run_subcommand(self):
            super()._run_subcommand()

        def fit(self):
            lightning["Trainer"]().fit()

    assert short_text(caught(Mine)) == "error: Lightning: no test_step"

    class OfItsOwn(Mine):
        def before_fit(self):
            lightning["refuse"]()

    assert short_text(caught(OfItsOwn)) is None, "it was the user's method that asked"

    class Within(Mine):
        def fit(self):
            lightning["Trainer"]().fit(lambda: lightning["refuse"]())

    assert short_text(caught(Within)) is None, "a frame of the user's lies within the run"
