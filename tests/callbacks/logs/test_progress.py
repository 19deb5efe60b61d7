import io
import logging
import re
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_ups.callbacks.logs.progress import LeanProgressBar
from tests.late_device import Reads
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Logging(Net):
    def __init__(self, *, prog_bar=False):
        super().__init__()
        self.prog_bar = prog_bar

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=self.prog_bar)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)  # Adam reads its own count of steps


class Behind(Logging):
    """Counts its batches for a device that is behind."""

    def __init__(self, device):
        super().__init__()
        self.device_behind = device

    def training_step(self, batch, batch_idx):
        self.device_behind.batch += 1
        return super().training_step(batch, batch_idx)


class Paints(LeanProgressBar):
    """Keeps what is painted, and after how many batches."""

    def __init__(self, device, **options):
        super().__init__(**options)
        self.device, self.painted = device, []

    def _paint(self, trainer, pl_module):
        super()._paint(trainer, pl_module)
        bar = self.train_progress_bar
        self.painted.append((bar.n, self.device.batch, bar.postfix or ""))


def fit(tmp_path, bar, module=None, **options):
    run = Trainer(
        accelerator="cpu",
        callbacks=[bar],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_steps": 20, "max_epochs": -1, **options},
    )
    run.fit(module or Logging(), loader(size=2))  # 4 batches an epoch
    return run


def test_reads_only_when_it_refreshes(tmp_path):
    with Reads() as lean:
        fit(tmp_path, LeanProgressBar(refresh_rate=10), log_every_n_steps=1000)
    with Reads() as stock:
        fit(tmp_path, TQDMProgressBar(refresh_rate=10), Logging(prog_bar=True), log_every_n_steps=1000)
    assert stock.count > 20  # what it is for: once a step and more
    # Two refreshes, and the end of each of five epochs, when Lightning itself reads for the loggers and the bar.
    assert lean.count <= 2 + 2 * 5


def test_shows_the_logged_loss_and_counts_to_the_end_of_the_run(tmp_path, capsys):
    module = Logging()
    fit(tmp_path, LeanProgressBar(refresh_rate=10), module)
    shown = capsys.readouterr().out
    assert "Training: 100%" in shown
    assert "20/20" in shown
    assert f"train_loss={module.losses[-1].item():.3g}"[:16] in shown
    assert "11/20" not in shown


def test_counts_optimizer_steps_and_not_batches(tmp_path, capsys):
    fit(tmp_path, LeanProgressBar(refresh_rate=1), max_steps=3, accumulate_grad_batches=2)
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert "4/3" not in shown


def test_without_max_steps_it_counts_batches_of_the_epoch(tmp_path, capsys):
    fit(tmp_path, LeanProgressBar(refresh_rate=1), max_steps=-1, max_epochs=2)
    shown = capsys.readouterr().out
    assert "Epoch 1" in shown
    assert "4/4" in shown


class Talks(Logging):
    def training_step(self, batch, batch_idx):
        self.talker.info("something to know")
        if self.trainer.global_step == self.fails_at:
            raise KeyError("mine")
        return super().training_step(batch, batch_idx)

    fails_at = None
    name = ""

    @property
    def talker(self):
        return logging.getLogger(self.name)


@pytest.mark.parametrize("fails_at", [None, 3])
@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "somebody.else"])
def test_what_is_logged_stands_above_the_bar(tmp_path, monkeypatch, name, fails_at):
    seen, module, logger = io.StringIO(), Talks(), logging.getLogger(name)
    module.name, module.fails_at = f"{name}.somewhere", fails_at
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(seen)])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    before = [*logger.handlers]
    with redirect_stdout(seen), redirect_stderr(seen), suppress(KeyError):  # as a terminal shows both
        fit(tmp_path, LeanProgressBar(refresh_rate=1), module)
    lines = [line for line in re.split(r"[\r\n]", seen.getvalue()) if "something to know" in line]
    assert len(lines) == (20 if fails_at is None else 4)
    assert {line.strip() for line in lines} == {"something to know"}
    assert "Training:" in seen.getvalue()
    assert logger.handlers == before


def test_it_is_painted_when_the_numbers_of_a_refresh_have_come_and_waits_only_for_the_last(tmp_path, late_device):
    module, bar = Behind(late_device), Paints(late_device, refresh_rate=6)
    fit(tmp_path, bar, module)
    assert [(n, batch) for n, batch, _ in bar.painted] == [(6, 8), (12, 14), (20, 20), (20, 20)]
    assert bar.painted[0][2] == f"train_loss={module.losses[5].item():.3g}"[:16]
    assert bar.painted[-1][2].startswith(f"train_loss={module.losses[-1].item():.3g}"[:16])
    assert late_device.waits == [20]


def test_where_it_counts_epochs_each_ends_with_its_own_numbers(tmp_path, late_device, capsys):
    module, bar = Behind(late_device), Paints(late_device, refresh_rate=1)
    fit(tmp_path, bar, module, max_steps=-1, max_epochs=2)
    assert late_device.waits == [4, 8]
    ends = [f"train_loss={module.losses[i].item():.3g}"[:16] for i in (3, 7)]
    shown = capsys.readouterr().out
    assert all(end in shown for end in ends)
    assert bar.get_metrics(module.trainer, module) == {"train_loss": module.losses[-1].item()}


def test_a_second_fit_does_not_show_the_numbers_of_the_first(tmp_path, late_device):
    bar = Paints(late_device, refresh_rate=10)
    fit(tmp_path, bar, Behind(late_device), max_steps=3)
    assert bar._come
    module, seen = Behind(late_device), []
    module.on_train_batch_start = lambda *_: seen.append(dict(bar._come))
    late_device.reached = late_device.batch
    fit(tmp_path, bar, module, max_steps=3)
    assert seen == [{}] * 3


def test_a_bar_of_other_ranks_asks_the_device_for_nothing(tmp_path, late_device):
    bar = Paints(late_device, refresh_rate=1)
    module = Behind(late_device)
    module.setup = lambda stage: bar.disable()  # as Lightning does there before
    fit(tmp_path, bar, module, max_steps=-1, max_epochs=1)
    assert bar.painted == []
    assert late_device.waits == []


def test_an_unknown_metric_is_warned_of_once_with_the_nearest_name(tmp_path):
    class Logging(Net):
        def training_step(self, batch, index):
            self.log("train/loss", 1.0)
            return super().training_step(batch, index)

    bar = LeanProgressBar(metrics=["train/los"])
    made = trainer(tmp_path, callbacks=[bar], epochs=2, enable_progress_bar=True)
    with pytest.warns(UserWarning, match="no 'train/los'.* Did you mean 'train/loss'") as warned:
        made.fit(Logging(), loader())
    assert sum("no 'train/los'" in str(each.message) for each in warned) == 1
