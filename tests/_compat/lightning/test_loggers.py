import math
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from lightning_ups._compat.lightning.loggers import (
    _Filling,
    connector,
    is_row_of_step,
    logged_hyperparameters,
    moved_if_elsewhere,
    without_waiting,
)
from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.transforms.patching import instead_of
from tests.late_device import put_in_place
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUMBERS = [0.1, -0.0, 3, -(2**53), 1e300, 1e-46, math.inf, 2.0**-149, 16777217]


def quiet(*, epochs=1, **options):
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("number", NUMBERS)
def test_each_number_is_the_one_that_torch_makes_of_it(number, dtype):
    if dtype is None and type(number) is int:
        dtype = torch.int64
    options = {} if dtype is None else {"dtype": dtype}
    expected = torch.tensor(number, device="cpu", **options)
    with _Filling(), Copies() as copies:
        found = torch.tensor(number, device="cpu", **options)
    assert copies.count == 0
    assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, False)
    assert struct.pack("d", found.item()) == struct.pack("d", expected.item())
    assert "nan" in repr(filled(math.nan))


def filled(value):
    with _Filling():
        return torch.tensor(value)


@pytest.mark.parametrize("value", [True, 2**53 + 1, [1.0, 2.0], np.float32(0.1), np.float64(0.1)], ids=repr)
def test_others_are_left_to_torch(value):
    found, expected = filled(value), torch.tensor(value)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


class Copies(TorchDispatchMode):
    """Counts tensors that are made of Python's data: on a GPU the host waits for each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


class Numbers(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        with self.copies:
            self.log("plain", 0.1 * index)
            self.log_dict({"count": index, "tensor": loss}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Counting(LearningRateMonitor):
    def __init__(self, copies):
        super().__init__()
        self.copies, self.kept = copies, []

    def on_train_batch_start(self, trainer, *args):
        with self.copies:
            super().on_train_batch_start(trainer, *args)
        self.kept.append(trainer.callback_metrics.get("lr-SGD"))


class Clears(Callback):
    """The states of what is logged are made once, and their zeros are copied once."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 0:
            module.copies.count = 0


@pytest.mark.parametrize("late", [True, False])
def test_no_number_that_is_logged_is_copied_to_the_device(tmp_path, monkeypatch, late):
    put_in_place(monkeypatch.setattr, lag=0)
    module, copies = Numbers(), Copies()
    module.copies, monitor = copies, Counting(copies)
    callbacks = [AccelerationFlags(late_logs=late), monitor, Clears()]
    run = quiet(logger=CSVLogger(tmp_path, name="", version=""), callbacks=callbacks, log_every_n_steps=1)
    before = LightningModule._LightningModule__to_tensor
    run.fit(module, loader(1))
    assert copies.count == (0 if late else 7 * 3), "two numbers and a learning rate, in each step after the first"
    assert LightningModule._LightningModule__to_tensor is before
    assert "_extract_stats" not in vars(monitor)
    assert torch.equal(torch.stack(monitor.kept), torch.full((8,), 1e-2))
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert any(str(torch.tensor(0.1 * 7).item()) in row for row in rows)


@pytest.mark.gpu
def test_nobody_waits_for_a_gpu():
    module = LightningModule().cuda()
    monitor = LearningRateMonitor()
    monitor._extract_stats = lambda: {"lr": torch.tensor(1e-3, device="cuda")}
    log = LightningModule._LightningModule__to_tensor
    log(module, 3.0, "warm")
    run = Trainer(callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False)
    place = without_waiting(run)
    place.__enter__()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = LightningModule._LightningModule__to_tensor(module, 0.1, "plain"), monitor._extract_stats()["lr"]
        with pytest.raises(RuntimeError, match="synchronizing"):
            log(module, 0.1, "plain")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        place.__exit__(None, None, None)
    assert [value.item() for value in kept] == [torch.tensor(0.1).item(), torch.tensor(1e-3).item()]


NAMES, STEPS = ("loss", "last", "most", "number", "metric"), 8


class Logging(Net):
    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=2)
        self.log("last", loss.double() * batch_idx, on_step=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 3.0 + batch_idx)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_epoch=True)
        return loss


def logged(folder, *callbacks):
    torch.manual_seed(0)
    trainer = quiet(
        logger=CSVLogger(folder), callbacks=[*callbacks], epochs=2, limit_val_batches=0, log_every_n_steps=1
    )
    trainer.fit(Logging(), loader(size=2))
    rows = (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    return rows, dict(trainer.callback_metrics)


def test_what_is_logged_is_the_same(tmp_path):
    rows, metrics = logged(tmp_path / "stock")
    ours, found = logged(tmp_path / "ours", AccelerationFlags())
    assert ours == rows
    assert found.keys() == metrics.keys() >= {"loss_epoch", "last", "most", "number", "metric_epoch"}
    assert all(torch.equal(found[name], value) for name, value in metrics.items())


def test_a_record_is_walked_through_once_and_not_at_each_step(tmp_path, monkeypatch):
    walks, stock = [], _ResultMetric.to

    def to(self, *args, **kwargs):
        walks.append(self.meta.name)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(_ResultMetric, "to", to)
    logged(tmp_path / "stock")
    assert Counter(walks) == dict.fromkeys(NAMES, STEPS + 1), "the last when all is brought to the CPU"
    walks.clear()
    logged(tmp_path / "ours", AccelerationFlags())
    # On a CPU nothing ever has to move; a record of a metric is the metric's own, and left to Lightning.
    assert Counter(walks) == {"metric": STEPS + 1}
    assert _ResultMetric.to is to


def test_what_is_elsewhere_is_moved_as_before():
    with moved_if_elsewhere():
        results = _ResultCollection(training=True)
        results.log("training_step", "a", torch.tensor(2.0), on_step=True, on_epoch=True, batch_size=3)
        (record,) = results.values()
        assert record.to("cpu") is record, "asked by name, Lightning looks"
        kept = record.cumulated_batch_size
        for elsewhere in ("value", "cumulated_batch_size", "_forward_cache"):
            setattr(record, elsewhere, getattr(record, elsewhere).to("meta"))
            record.to(torch.device("meta"))
            assert record.value.device.type == record._defaults["value"].device.type == "meta", elsewhere
            for name in ("value", "cumulated_batch_size", "_forward_cache"):
                setattr(record, name, torch.ones_like(kept, device="cpu"))
            record._defaults = {name: torch.zeros(()) for name in record._defaults}
        record._defaults["value"] = torch.zeros((), device="meta")
        record.to(torch.device("meta"))
        assert record.value.device.type == "meta", "a default that is elsewhere counts"


class Logs(Net):
    def training_step(self, batch, index):
        self.log("loss", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, index)

    def validation_step(self, batch, _):
        self.log("val", 2.0, on_step=True, on_epoch=True)


class Listens(Callback):
    def __init__(self):
        self.heard = []

    def on_sanity_check_start(self, trainer, _):
        stock = connector(trainer).log_metrics

        def log_metrics(metrics, step=None):
            self.heard.append((sorted(metrics), step, is_row_of_step(trainer)))
            stock(metrics, step)

        self.place = instead_of(connector(trainer), "log_metrics", log_metrics)
        self.place.__enter__()


def test_all_that_loops_log_goes_through_it_and_rows_of_steps_are_told_apart(tmp_path):
    listens = Listens()
    run = quiet(logger=CSVLogger(tmp_path), callbacks=[listens], log_every_n_steps=1)
    run.fit(Logs(), loader(4), loader(8))
    of_training = [(names, step) for names, step, of_step in listens.heard if of_step]
    assert of_training == [(["loss_step"], None)] * 2
    others = [(names, step) for names, step, of_step in listens.heard if not of_step]
    assert (["val_step"], 0) in others
    assert (["val_epoch"], None) in others
    assert (["loss_epoch"], None) in others


class Kept(Logger):
    """Keeps what Lightning logs."""

    def __init__(self):
        super().__init__()
        self.seen = None

    name = version = ""

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        self.seen = dict(params)


class Module(Net):
    def __init__(self, width=1, logged=True):
        super().__init__()
        self.save_hyperparameters("width", logger=logged)


class Data(LightningDataModule):
    def __init__(self, size=4, logged=True):
        super().__init__()
        self.save_hyperparameters("size", logger=logged)

    def train_dataloader(self):
        return loader(self.hparams.size)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("of_module", [True, False])
@pytest.mark.parametrize("of_data", [True, False])
def test_it_is_what_lightning_logs(tmp_path, of_module, of_data):
    logger = Kept()
    run = quiet(logger=logger, default_root_dir=tmp_path)
    run.fit(Module(logged=of_module), Data(logged=of_data))
    assert logged_hyperparameters(run) == (logger.seen or {})
    assert ("width" in logged_hyperparameters(run)) is of_module


def test_a_profiler_times_each_hook_and_without_one_nothing_is_timed(tmp_path):
    for profiler in (SimpleProfiler(), None):
        run, places = trainer(tmp_path, callbacks=[AccelerationFlags()], epochs=1, profiler=profiler), []
        model = Net()
        model.on_train_start = lambda run=run, places=places: places.append("profile" in vars(run.profiler))
        run.fit(model, loader())
        assert places == [profiler is None]
        assert "profile" not in vars(run.profiler)
        if profiler is not None:
            assert profiler.recorded_durations["[LightningModule]Net.on_train_batch_end"]
