import io
import logging
import re
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.callbacks.progress import LeanProgressBar
from tests.toys import Net, loader

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


class CountReads(TorchDispatchMode):
    """Counts how often a real number is read out of a tensor, for which a GPU would have to finish its work."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


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
    with CountReads() as lean:
        fit(tmp_path, LeanProgressBar(refresh_rate=10), log_every_n_steps=1000)
    with CountReads() as stock:
        fit(tmp_path, TQDMProgressBar(refresh_rate=10), Logging(prog_bar=True), log_every_n_steps=1000)
    assert stock.reads > 20  # what it is for: once a step and more
    # Two refreshes, and the end of each of five epochs, when Lightning itself reads for the loggers and the bar.
    assert lean.reads <= 2 + 2 * 5


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


def test_a_metric_that_is_not_logged_is_left_out(tmp_path, capsys):
    fit(tmp_path, LeanProgressBar(refresh_rate=1, metrics=("train_loss", "no_such")), max_steps=2)
    assert "no_such" not in capsys.readouterr().out


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
