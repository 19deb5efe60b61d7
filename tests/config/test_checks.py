from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from lightning_ups.config import checks
from tests.cli_toys import Data, Predicting, Toy, Writing


@pytest.mark.parametrize("path", ["last", "best", "hpc", "s3://bucket/x.ckpt", "registry:model", None])
def test_checkpoints_that_lightning_finds(path):
    checks.check_checkpoint_exists(path)


def test_data():
    checks.check_data("fit", Toy(), Data())
    checks.check_data("predict", Predicting(), None)
    with pytest.raises(ValueError, match="Toy has no val_dataloader"):
        checks.check_data("validate", Toy(), None)


def test_a_scheduler_needs_an_optimizer():
    checks.check_scheduler_has_optimizer({"optimizer": {"class_path": "SGD"}}, {"lr_scheduler": {"class_path": "X"}})
    checks.check_scheduler_has_optimizer({"optimizer": None}, {"lr_scheduler": None})
    with pytest.raises(ValueError, match=r"'lr_scheduler'.*'optimizer'"):
        checks.check_scheduler_has_optimizer({"optimizer": None}, {"lr_scheduler": {"class_path": "X"}})


def test_folders(monkeypatch):
    monkeypatch.setenv("MINE", "/mine")
    monkeypatch.delenv("UNSET", raising=False)
    assert checks.expanded_folder("${MINE}/x") == checks.expanded_folder("$MINE/x") == "/mine/x"
    assert checks.expanded_folder("memory://$UNSET") == "memory://$UNSET"
    with pytest.raises(ValueError, match="UNSET"):
        checks.expanded_folder("$UNSET/x")


@pytest.mark.parametrize(
    ("module", "callbacks", "kept"),
    [
        (Predicting(), [EarlyStopping("a")], False),
        (Predicting(), [Writing()], True),
        (Predicting(), [type("Mine", (Callback,), {"on_predict_batch_end": lambda *_: None})()], True),
    ],
)
def test_predictions(module, callbacks, kept):
    assert checks.keeps_predictions(module, SimpleNamespace(callbacks=callbacks)) is kept
