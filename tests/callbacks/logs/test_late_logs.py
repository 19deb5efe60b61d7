import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ups.callbacks import AccelerationFlags, LeanProgressBar, TrainingReport
from lightning_ups.callbacks.logs import training_report
from lightning_ups.callbacks.logs.late_logs import LateLogs
from lightning_ups.order import applied
from tests.late_device import LateDevice, Reads, put_in_place
from tests.toys import Net, data, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The `srun`", "ignore::DeprecationWarning")


class Logging(Net):
    """Logs in the ways that Lightning has."""

    def __init__(self, device=None):
        super().__init__()
        self.late, self.mean, self.fails_at = device or LateDevice(lag=0), MeanMetric(), {}

    def training_step(self, batch, index):
        self.late.batch += 1
        if (error := self.fails_at.get(self.global_step)) is not None:
            self.late.reached = 1000  # such a device answers afterwards
            raise error
        loss = super().training_step(batch, index)
        self.mean(loss)
        self.log("train_loss", loss)
        self.log("both", loss * 3, on_step=True, on_epoch=True, sync_dist=True)
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        self.log("double", loss.double() / 3)
        self.log("number", float(index))
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.head(batch).mean(), on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)  # Adam reads its own count of steps


class ByHand(Logging):
    def __init__(self, device=None):
        super().__init__(device)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class OwnStep(Logging):
    def training_step(self, batch, index):
        self.log("step", torch.tensor(100.0 + self.global_step))
        return super().training_step(batch, index)


class Rows(Logger):
    """Keeps what it gets, and the batch in which it got it."""

    def __init__(self, device):
        super().__init__()
        self.device, self.rows, self.saved = device, [], 0

    name, version = "rows", 0

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, self.device.batch, dict(metrics)))

    def save(self):
        self.saved += 1

    @property
    def when(self):
        """The step of each row and the batch of its coming."""
        return [(step, batch) for step, batch, metrics in self.rows if "train_loss" in metrics]


def fitted(tmp_path, module, *, loggers=True, late=True, callbacks=(), before=(), train=None, **options):
    callbacks = [*before, AccelerationFlags(late_logs=late), *callbacks]
    options = {"max_epochs": 1, "log_every_n_steps": 2, "limit_val_batches": 0, **options}
    run = trainer(tmp_path, callbacks=callbacks, logger=loggers, **options)
    run.fit(module, train or loader(1), loader(4))  # 8 batches an epoch
    return run


def test_rows_come_late_with_their_own_step_and_the_rest_at_the_end(tmp_path, late_device):
    rows = Rows(late_device)
    run = fitted(tmp_path, Logging(late_device), loggers=rows)
    # Logged at the end of batch 2, reached by the device two batches later; the last one is waited for.
    assert rows.when == [(1, 4), (3, 6), (5, 8), (7, 8)]
    assert late_device.waits == [8]
    assert {metrics["epoch"] for _, _, metrics in rows.rows} == {0}
    assert isinstance(run.logged_metrics["train_loss"], torch.Tensor)


def test_rows_that_wait_are_bounded(tmp_path, late_device):
    late_device.lag, rows = 1000, Rows(late_device)
    fitted(tmp_path, Logging(late_device), loggers=rows, log_every_n_steps=1, train=DataLoader(data().repeat(2, 1)))
    assert rows.when == [*((step, step + 9) for step in range(8)), *((step, 16) for step in range(8, 16))]


@pytest.fixture
def interruptible():
    """Give the process back its Ctrl-C, which Lightning takes away from it after one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class InSteps(Callback):
    """Counts reads from one batch to the next."""

    def __init__(self):
        self.reads, self._open = [], None

    def on_train_batch_start(self, *_):
        self.close()
        self._open = Reads()
        self._open.__enter__()

    def close(self):
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self.reads.append(self._open.count)
            self._open = None

    def on_train_epoch_end(self, *_):
        self.close()


@pytest.mark.parametrize("late", [True, False])
def test_no_number_is_read_at_a_logged_step(tmp_path, late_device, late):
    counted = InSteps()
    bar = LeanProgressBar(refresh_rate=2)
    options = {"loggers": [CSVLogger(tmp_path), Rows(late_device)], "enable_progress_bar": True}
    fitted(tmp_path, Logging(late_device), late=late, callbacks=[counted, bar], **options)
    assert len(counted.reads) == 8
    numbers = 5  # what is logged, once each, by the second batch of two
    assert counted.reads == ([0] * 8 if late else [0, numbers] * 4)
    assert late_device.waits == [8], "at the end of the epoch"


CASES = {
    "plain": {},
    "every step": {"log_every_n_steps": 1},
    "accumulated": {"accumulate_grad_batches": 2, "log_every_n_steps": 1},
    "epochs": {"max_epochs": 3, "log_every_n_steps": 3},
    "validation": {"limit_val_batches": 2, "val_check_interval": 3, "log_every_n_steps": 2, "max_epochs": 2},
    "one batch": {"fast_dev_run": True},
    "max_steps": {"max_epochs": -1, "max_steps": 13},
}


def files(folder, *, late, device=None, callbacks=(), kind=Logging, **options):
    """Return the bytes of every table, after three fits, two of them with one Trainer."""
    module = kind(device)
    loggers = [CSVLogger(folder, name="a"), CSVLogger(folder, name="b", flush_logs_every_n_steps=1)]
    run = fitted(folder, module, loggers=loggers, late=late, callbacks=callbacks, **options)
    run.fit_loop.epoch_progress.reset()
    if run.fit_loop.max_epochs != -1 and not options.get("fast_dev_run"):
        run.fit_loop.max_epochs += 1
    run.fit(module, loader(1), loader(4))
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("metrics.csv"))}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, Logging) for case in CASES),
        ("plain", ByHand),
        ("validation", ByHand),
        ("plain", OwnStep),
        ("validation", OwnStep),
    ],
)
def test_files_are_those_of_a_run_without_it(tmp_path, late_device, case, kind):
    def callbacks():
        return [LearningRateMonitor("step")] if case != "one batch" else []

    one = files(tmp_path / "late", late=True, device=late_device, callbacks=callbacks(), kind=kind, **CASES[case])
    assert late_device.marks > 0
    two = files(tmp_path / "stock", late=False, callbacks=callbacks(), kind=kind, **CASES[case])
    assert one == two
    assert len(one) == (0 if case == "one batch" else 2)


def test_a_validation_comes_after_the_rows_before_it(tmp_path, late_device):
    rows = Rows(late_device)
    fitted(tmp_path, Logging(late_device), loggers=rows, limit_val_batches=1, val_check_interval=4)
    names = [(step, "train" if "train_loss" in metrics else "val") for step, _, metrics in rows.rows]
    assert names[:5] == [(1, "train"), (3, "train"), (0, "val"), (3, "val"), (5, "train")]
    assert rows.when[1] == (3, 4), "waited for"


def test_a_checkpoint_has_the_rows_before_it(tmp_path, late_device):
    rows, seen = Rows(late_device), []

    class Saves(Logging):
        def on_save_checkpoint(self, checkpoint):
            seen.append((self.global_step, len(rows.rows)))

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
    run = fitted(tmp_path, Saves(late_device), loggers=rows, callbacks=[saves], enable_checkpointing=True)
    assert seen[:2] == [(3, 1), (6, 2)], "the rows of steps 1, and of 1 and 3; that of step 5 is logged after it"
    assert "save_checkpoint" not in vars(run)


def test_what_others_log_comes_after_the_rows_before_it(tmp_path, late_device):
    rows = Rows(late_device)

    class Talks(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step in (2, 7):
                trainer.logger.log_metrics({"mine": 1.0}, step=trainer.global_step)

    fitted(tmp_path, Logging(late_device), loggers=rows, callbacks=[Talks()])
    assert [("mine" in metrics, step) for step, _, metrics in rows.rows][:6] == [
        (False, 1),
        (True, 2),
        (False, 3),
        (False, 5),
        (True, 7),
        (False, 7),
    ]


@pytest.mark.parametrize("error", [RuntimeError("not finite"), KeyboardInterrupt()])
@pytest.mark.usefixtures("interruptible")
def test_a_run_that_ends_early_has_its_rows(tmp_path, late_device, error):
    late_device.lag, rows, module, finalized = 1000, Rows(late_device), Logging(late_device), []
    module.fails_at = {4: error}
    rows.finalize = lambda status: finalized.append((status, len(rows.rows)))
    with pytest.raises((RuntimeError, SystemExit)):
        fitted(tmp_path, module, loggers=rows)
    assert rows.when == [(1, 5), (3, 5)]
    assert finalized == [("failed", 2)]
    assert "log_metrics" not in vars(rows)


def test_the_report_of_a_run_that_fails_has_the_last_rows_too(tmp_path, late_device, monkeypatch):
    pages = []
    monkeypatch.setattr(training_report, "page", lambda content: pages.append(content) or "")
    late_device.lag, module, report = 1000, Logging(late_device), TrainingReport(pictures=False)
    module.fails_at = {4: RuntimeError("not finite")}
    with pytest.raises(RuntimeError, match="not finite"):
        fitted(tmp_path, module, loggers=Rows(late_device), before=[report])
    (steps,) = [
        [step for step, _ in points]
        for chart in pages[0].charts
        for name, points in chart.series.items()
        if "double" in name
    ]
    assert steps == [1, 3]


def test_a_device_that_does_not_answer_is_left_after_a_while(tmp_path, late_device, monkeypatch, caplog):
    monkeypatch.setattr("lightning_ups.callbacks.logs.late_logs._PATIENCE_S", 0.05)
    late_device.lag, rows, module = 1000, Rows(late_device), Logging(late_device)
    module.fails_at = {4: RuntimeError("the first error")}
    module.late = LateDevice(lag=0)  # that of the test is not told
    with (
        pytest.raises(RuntimeError, match="the first error"),
        pytest.warns(UserWarning, match="did not get the last rows of 2 logged steps"),
    ):
        fitted(tmp_path, module, loggers=rows)
    assert rows.rows == []
    assert late_device.waits == []


class Monitor(Callback):
    """Logs from a thread of its own, as a monitor of GPUs does."""

    def __init__(self, logger):
        self.logger, self.threads = logger, []

    def tell(self):
        self.threads.append(threading.Thread(target=self.logger.log_metrics, args=({"gpu": 1.0}, 0), daemon=True))
        self.threads[-1].start()


class FromThreads(Rows):
    """Knows the threads from which it was called, and holds back every thread but its own until it is told."""

    def __init__(self, device):
        super().__init__(device)
        self.own, self.called, self.go_on, self.entered = (
            threading.get_ident(),
            [],
            threading.Event(),
            threading.Event(),
        )

    def log_metrics(self, metrics, step=None):
        self.called.append(("gpu" in metrics, threading.get_ident() == self.own))
        if threading.get_ident() != self.own:
            self.entered.set()
            assert self.go_on.wait(60)
        super().log_metrics(metrics, step)


def test_what_another_thread_logs_goes_straight_through(tmp_path, late_device):
    rows = FromThreads(late_device)
    rows.go_on.set()

    class Each(Monitor):
        def on_train_batch_start(self, *_):
            self.tell()
            self.threads[-1].join(60)

    fitted(tmp_path, Logging(late_device), loggers=rows, callbacks=[Each(rows)])
    assert rows.when == [(1, 4), (3, 6), (5, 8), (7, 8)], "as without the thread"
    assert rows.called.count((True, False)) == 8
    assert rows.called.count((False, True)) == len(rows.called) - 8, "every row from the thread that trains"


class Broken(Rows):
    """Its server goes away after the first rows."""

    tries = 0

    def log_metrics(self, metrics, step=None):
        if step >= 2:
            self.tries += 1
            raise ConnectionError(f"server away at {step}")
        super().log_metrics(metrics, step)


class SavesAtLast(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


class Ended(Callback):
    def __init__(self):
        self.errors = []

    def on_exception(self, trainer, module, exception):
        self.errors.append(exception)


def fails(tmp_path, module, rows, error, **options):
    """Check that a run ends by that error alone, with a last checkpoint, and all as it was."""
    last = tmp_path / "last.ckpt"
    ended = Ended()
    with pytest.raises(type(error), match=str(error)) as found:
        fitted(tmp_path, module, loggers=rows, before=[SavesAtLast(last)], callbacks=[ended], **options)
    assert ended.errors == [found.value]
    assert last.exists()
    assert "log_metrics" not in vars(rows)
    assert "save_checkpoint" not in vars(module.trainer)
    assert applied(module.trainer.strategy) is None


@pytest.mark.parametrize("late", [True, False])
def test_a_logger_that_fails_ends_the_run_once(tmp_path, late_device, late, recwarn):
    late_device.lag, rows = 4, Broken(late_device)
    error = ConnectionError("server away at 2")
    fails(tmp_path, Logging(late_device), rows, error, late=late, log_every_n_steps=1)
    assert rows.tries == 1
    assert [step for step, _ in rows.when] == [0, 1]
    said = [str(one.message) for one in recwarn if "did not get" in str(one.message)]
    # The device comes to the third row in the seventh batch, when three others wait behind it.
    assert [one.partition(". ")[0] for one in said] == (
        ["The loggers did not get the last rows of 4 logged steps: server away at 2"] if late else []
    )


@pytest.mark.parametrize("warns", ["always", "error"])
def test_a_logger_that_fails_at_the_end_does_not_hide_why_the_run_ends(tmp_path, late_device, warns):
    late_device.lag, rows, module = 1000, Broken(late_device), Logging(late_device)
    module.fails_at = {4: RuntimeError("not finite")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.filterwarnings(warns, "The loggers did not get")
        fails(tmp_path, module, rows, RuntimeError("not finite"), log_every_n_steps=1)
    assert [step for step, _ in rows.when] == [0, 1]
    assert rows.tries == 1
    lost = "The loggers did not get the last rows of 2 logged steps: server away at 2"
    assert [str(one.message).partition(". ")[0] for one in said] == ([lost] if warns == "always" else [])


class OtherLoggers(Callback):
    """Gives the trainer another logger for a while, as a search for a learning rate does, and logs by it."""

    def __init__(self, other):
        self.other = other

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 3:
            self.first, trainer.loggers = trainer.loggers, [self.other]
        if index == 5:
            trainer.logger.log_metrics({"mine": 1.0}, step=index)
            trainer.loggers = self.first


@pytest.mark.parametrize("late", [True, False])
def test_a_row_goes_to_the_loggers_of_its_step(tmp_path, late_device, late):
    late_device.lag, rows, other = 1000, Rows(late_device), Rows(late_device)
    options = {"loggers": rows, "callbacks": [OtherLoggers(other)], "log_every_n_steps": 1}
    fitted(tmp_path, Logging(late_device), late=late, **options)
    assert [step for step, _ in rows.when] == [0, 1, 2, 5, 6, 7]
    assert [(step, "mine" in metrics) for step, _, metrics in other.rows] == [(3, False), (4, False), (5, True)]
    assert not [logger for logger in (rows, other) if "log_metrics" in vars(logger)]


def test_every_logger_is_as_it_was_afterwards(tmp_path, late_device):
    loggers = [CSVLogger(tmp_path), Rows(late_device)]
    run = fitted(tmp_path, Logging(late_device), loggers=loggers)
    for owner, name in ((run._logger_connector, "log_metrics"), (run, "save_checkpoint")):
        assert name not in vars(owner)
    assert not [logger for logger in loggers if "log_metrics" in vars(logger)]


def test_a_row_of_plain_numbers_keeps_its_place_behind_one_that_waits(tmp_path, late_device):
    run = Trainer(logger=Rows(late_device), accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False)
    run._logger_connector._first_loop_iter, run.training = True, True
    with LateLogs(run) as logs:
        run._logger_connector.log_metrics({"a": torch.tensor(1.0), "z": 4})
        run._logger_connector.log_metrics({"b": 2.0})
        logs.look()
        assert run.logger.rows == []
        late_device.batch += 2
        logs.look()
    assert [metrics for _, _, metrics in run.logger.rows] == [{"a": 1.0, "z": 4, "epoch": 0}, {"b": 2.0, "epoch": 0}]
    assert run.logger.saved == 2


def test_on_a_cpu_nothing_is_put_in_between(tmp_path):
    rows, module, seen = Rows(device := LateDevice(lag=0)), Logging(device), []
    module.on_train_batch_end = lambda *_: seen.append(
        "log_metrics" in vars(module.trainer._logger_connector) or "log_metrics" in vars(rows)
    )
    fitted(tmp_path, module, loggers=rows)
    assert seen == [False] * 8
    assert rows.when == [(1, 2), (3, 4), (5, 6), (7, 8)]


def on_a_gpu(folder, module, *, late):
    """Return the table of a run on a GPU."""
    callbacks = [AccelerationFlags(late_logs=late), LeanProgressBar(refresh_rate=2)]
    options = {"accelerator": "gpu", "devices": 1, "log_every_n_steps": 2, "enable_progress_bar": True}
    run = trainer(folder, callbacks=callbacks, epochs=1, logger=CSVLogger(folder), **options)
    batches = [torch.randn(64, 8, generator=torch.Generator().manual_seed(i)).pin_memory() for i in range(16)]
    run.fit(module, DataLoader(batches, batch_size=None))
    return next(Path(folder).rglob("metrics.csv")).read_bytes()


@pytest.mark.gpu
def test_the_values_of_a_gpu_are_stocks(tmp_path):
    late = on_a_gpu(tmp_path / "late", Logging(), late=True)
    assert late.count(b"\n") == 1 + 8 + 1
    assert late == on_a_gpu(tmp_path / "stock", Logging(), late=False)


@pytest.mark.gpu
@pytest.mark.parametrize("late", [True, False])
def test_no_logged_step_waits_for_a_gpu(tmp_path, late):
    class Strict(Net):
        def on_train_batch_start(self, batch, index):
            torch.cuda.set_sync_debug_mode("error" if 2 < index < 13 else "default")

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("train_loss", loss)
            self.log("both", loss * 3, on_step=True, on_epoch=True)
            self.log("double", loss.double() / 3)
            self.log("here", torch.tensor(0.5))  # a plain number would be copied to the GPU, which waits
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    try:
        if late:
            assert on_a_gpu(tmp_path, Strict(), late=True).count(b"\n") == 1 + 8 + 1
        else:
            with pytest.raises(RuntimeError, match="synchronizing"):
                on_a_gpu(tmp_path, Strict(), late=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_two_ranks(folder, strategy):
    """Return the table of a run with and of one without it, on each rank, and what rank 1 waited for."""
    import lightning_ups  # noqa: F401  (registers "fsdp2")

    tables, folder = {}, Path(folder)
    for late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            device = put_in_place(patch.setattr, lag=2)
            rows, table = Rows(device), CSVLogger(folder / str(late))
            options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
            fitted(folder, Logging(device), loggers=[table, rows], late=late, limit_val_batches=1, **options)
            assert device.waits == ([8] if late else [])
            assert rows.when == ([(1, 4), (3, 6), (5, 8), (7, 8)] if late else [(i, i + 1) for i in (1, 3, 5, 7)])
        tables[late] = [path.read_bytes() for path in (folder / str(late)).rglob("metrics.csv")]
    return tables


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_every_rank_nobody_waits_and_rank_zero_has_the_rows(ranks, tmp_path, strategy):
    tables = ranks(on_two_ranks, str(tmp_path), strategy)
    assert tables[True] == tables[False]
    assert len(tables[True]) == 1


def test_tensorboard_gets_each_value_at_its_step(tmp_path, late_device):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def curve(folder, **options):
        board = TensorBoardLogger(folder)
        fitted(folder, Logging(options.pop("device", None)), loggers=board, **options)
        found = events.EventAccumulator(board.log_dir)
        found.Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    late = curve(tmp_path / "late", device=late_device)
    assert len(late["train_loss"]) == 4
    assert late == curve(tmp_path / "stock", late=False)
