import math
import struct

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups._compat.lightning.logging.logged_numbers import _Filling, without_waiting
from lightning_ups.callbacks import AccelerationFlags
from tests.late_device import put_in_place
from tests.toys import Net, loader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUMBERS = [0.1, -0.0, 3, -(2**53), 1e300, 1e-46, math.inf, 2.0**-149, 16777217]


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
    run = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[AccelerationFlags(late_logs=late), monitor, Clears()],
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
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
