from collections import Counter

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torchmetrics import MeanMetric

from lightning_ups._compat.lightning.logging.logged_values import moved_if_elsewhere
from lightning_ups.callbacks import AccelerationFlags
from tests.toys import Net, loader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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
    logger = CSVLogger(folder)
    trainer = Trainer(
        max_epochs=2,
        limit_val_batches=0,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[*callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
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
