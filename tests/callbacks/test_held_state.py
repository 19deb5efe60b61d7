"""Counting FLOPs acts on nothing that a module holds: training is that of a run without it, bit for bit."""

import functools
import io
import queue
import random
import re
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ups.callbacks import TokenThroughput
from lightning_ups.callbacks.logs.measured_run import MeasuredRun
from tests.callbacks.held_state import HOLDERS, Gan, Holding
from tests.toys import Net, trainer

LAYER = 2 * 8 * 8


def fitted(tmp_path, module, *, counts, **options):
    random.seed(0)
    throughput = TokenThroughput(warmup_steps=0, table=False, unit="samples", peak_tflops=1.0)
    made = trainer(tmp_path, callbacks=[throughput] if counts else [], epochs=1, **options)
    torch.manual_seed(7)
    made.fit(module, DataLoader(torch.randn(16, 8), batch_size=4))
    return throughput.summary


def seen_and_weights(module):
    return [module.seen, *(parameter.detach() for parameter in module.parameters())]


def assert_same(one, two):
    torch.testing.assert_close(seen_and_weights(two), seen_and_weights(one), rtol=0, atol=0)


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_held_goes_on_as_if_nothing_had_happened(tmp_path, name):
    plain, counted = Holding(*HOLDERS[name]), Holding(*HOLDERS[name])
    fitted(tmp_path, plain, counts=False)
    summary = fitted(tmp_path, counted, counts=True)
    assert_same(plain, counted)
    assert len(counted.seen) == 4
    if name == "cycle" and sys.version_info >= (3, 14):
        return  # Python has no copy of those of itertools any more
    assert summary.flops is not None, summary.why_no_mfu
    assert summary.flops.model == 2 * LAYER


def test_a_gan_keeps_its_pool_of_images(tmp_path):
    plain, counted = Gan(), Gan()
    fitted(tmp_path, plain, counts=False)
    summary = fitted(tmp_path, counted, counts=True)
    assert_same(plain, counted)
    torch.testing.assert_close(counted.pool.images, plain.pool.images, rtol=0, atol=0)
    assert summary.flops.model > 0


def numbers():
    n = 0.0
    while True:
        yield n
        n += 1


def loaded():
    return iter(DataLoader(torch.arange(16.0), batch_size=1))


class Closed:
    closings = 0

    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1
        return self.count

    def __del__(self):
        type(self).closings += 1


def queued():
    held = queue.Queue()
    for n in range(8):
        held.put(float(n))
    return held


@pytest.mark.parametrize(
    ("hold", "advance", "what"),
    [
        (lambda: map(abs, numbers()), next, r"self.held\[...\], a generator"),
        (loaded, lambda it: next(it).sum(), "self.held._sampler_iter, a generator"),
        (queued, lambda held: held.get(timeout=5), "self.held, a Queue"),
        (
            lambda: {"a": [io.StringIO("1\n2\n3\n4\n5\n6\n7\n8\n")]},
            lambda held: float(held["a"][0].readline()),
            "a StringIO",
        ),
        (lambda: [[n] for n in range(70000)], lambda held: held.pop()[0], "self.held, a list, whose 70,000 items"),
    ],
    ids=["within a map", "loader", "queue", "file", "long list"],
)
@pytest.mark.parametrize("hides", [False, True])
def test_what_cannot_be_copied_is_not_touched(tmp_path, caplog, hold, advance, what, hides):
    def hidden(held):
        try:
            return advance(held)
        except Exception:  # noqa: BLE001
            return 0.0

    plain, counted = (Holding(hold, hidden if hides else advance) for _ in range(2))
    fitted(tmp_path, plain, counts=False)
    with caplog.at_level("INFO"):
        summary = fitted(tmp_path, counted, counts=True)
    assert_same(plain, counted)
    assert summary.flops is None
    assert summary.why_no_mfu == "FLOPs were not counted; give flops_per_unit"
    (said,) = [record.message for record in caplog.records if "did not count" in record.message]
    assert re.search(what, said)
    assert "flops_per_unit" in said
    assert "\n" not in said


def test_what_is_held_and_not_used_is_no_hindrance(tmp_path):
    summary = fitted(tmp_path, Holding(lambda: [numbers(), Closed(), queued()], len), counts=True)
    assert summary.flops.model == 2 * LAYER
    assert Closed.closings <= 1 + 1 + 4  # those of real ones


class Acting(Net):
    """Acts on what it reaches by its Trainer, which is not what it holds."""

    def training_step(self, batch, index):
        self.logger.log_metrics({"own": 1.0}, step=self.global_step)
        self.logger.experiment.flushed = self.logger.log_dir + "/x"
        self.trainer.datamodule.rows.append(batch)
        self.trainer.should_stop = len(self.trainer.datamodule.rows) > 2
        self.trainer.lightning_module.head.calls = len(self.trainer.datamodule.rows)
        assert self.trainer.optimizers[0].param_groups[0]["lr"] is not None
        return super().training_step(batch, index)


class Rows(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.rows = []

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 8), batch_size=2)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_what_the_trainer_has_is_not_acted_on(tmp_path):
    found = []
    for callbacks in ([], [TokenThroughput(warmup_steps=0, table=False, peak_tflops=1.0, inspect_at=None)]):
        logger = CSVLogger(tmp_path, name=str(len(callbacks)))
        made = Trainer(
            accelerator="cpu", callbacks=callbacks, logger=logger, max_epochs=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=100,
        )  # fmt: skip
        module, rows = Acting(), Rows()
        made.fit(module, rows)
        logged = (tmp_path / str(len(callbacks)) / "version_0" / "metrics.csv").read_text()
        found.append((made.global_step, len(rows.rows), module.head.calls, logged, len(module.losses)))
    assert found[0] == found[1]
    assert callbacks[0].summary.flops is not None, callbacks[0].summary.why_no_mfu


class OwnOptimizer(Net):
    """Steps an optimizer that the Trainer does not know, and caches by the instance."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.own = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.own, 1, gamma=0.5)
        self.scale = functools.lru_cache(self._scale)

    def _scale(self, size):
        return torch.ones(size, device=self.device)

    def training_step(self, batch, index):
        loss = super().training_step(batch * self.scale(batch.shape[1]), index)
        self.own.zero_grad()
        self.manual_backward(loss)
        self.own.step()
        self.schedule.step()

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_an_optimizer_that_is_held_steps_for_the_run_alone(tmp_path):
    plain, counted = OwnOptimizer(), OwnOptimizer()
    fitted(tmp_path, plain, counts=False)
    summary = fitted(tmp_path, counted, counts=True)
    torch.testing.assert_close(counted.losses, plain.losses, rtol=0, atol=0)
    assert counted.schedule.last_epoch == plain.schedule.last_epoch == 4
    assert summary.flops is not None, summary.why_no_mfu


class Data:
    """A dataset of 64 MB in one, of 256 in pieces, of texts and of objects."""

    def __init__(self):
        self.array, self.tensor = np.zeros(2**23), torch.zeros(2**16)
        self.rows, self.pairs = ["text"] * 2**22, [(n, [n]) for n in range(2**17)]
        self.pieces = [np.zeros(2**14) for _ in range(2000)]

    def first(self):
        return self.array[0] + self.pieces[-1][0]


def test_data_that_are_held_are_not_copied(tmp_path):
    module = Holding(Data, Data.first)
    sizes = []

    def measured(self, batch):
        tracemalloc.start()
        begin(self, batch)
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    begin = MeasuredRun._first_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasuredRun, "_first_batch", measured)
        summary = fitted(tmp_path, module, counts=True)
    assert summary.flops.model == 2 * LAYER
    assert sizes[0] < 2**27, "of 350 MB"


@pytest.mark.parametrize(
    "write", [np.ndarray.sort, lambda array: array.fill(1), lambda array: torch.from_numpy(array).add_(1)]
)
def test_a_large_array_cannot_be_written(tmp_path, write):
    def advance(array):
        write(array)
        return array[-1]

    plain, counted = (Holding(lambda: np.arange(2.0**18)[::-1].copy(), advance) for _ in range(2))
    fitted(tmp_path, plain, counts=False)
    summary = fitted(tmp_path, counted, counts=True)
    assert_same(plain, counted)
    assert np.array_equal(plain.held, counted.held)
    assert summary.flops is None
