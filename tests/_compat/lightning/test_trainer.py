import sys

import lightning.pytorch
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_ups._compat.lightning.trainer import (
    automatic_specs,
    class_settings,
    setting_types,
    stand_in_for_pytorch_lightning,
    trainer_of,
)
from lightning_ups.models import PDEModule
from tests.cli_toys import Toy


@pytest.fixture
def no_pytorch_lightning(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("pytorch_lightning", "lightning_fabric"):
            monkeypatch.delitem(sys.modules, name)


def test_one_namespace_stands_for_the_other(no_pytorch_lightning):
    said = []
    with stand_in_for_pytorch_lightning(said.append):
        import lightning_fabric
        import pytorch_lightning as pl
        import pytorch_lightning.callbacks as callbacks
        from pytorch_lightning.callbacks.early_stopping import EarlyStopping as Same

        assert pl is lightning.pytorch
        assert callbacks is lightning.pytorch.callbacks
        assert Same is EarlyStopping
        assert lightning_fabric is lightning.fabric
    assert len(said) == 1
    assert "stands in for it" in said[0]


def test_the_real_module_stays_itself(no_pytorch_lightning):
    with stand_in_for_pytorch_lightning(lambda line: None):
        import pytorch_lightning.loggers  # noqa: F401
    assert lightning.pytorch.__spec__.name == "lightning.pytorch"
    assert lightning.pytorch.loggers.__spec__.name == "lightning.pytorch.loggers"
    assert lightning.pytorch.loggers.__name__ == "lightning.pytorch.loggers"


def test_over_when_the_context_ends(no_pytorch_lightning):
    before = [*sys.meta_path]
    with stand_in_for_pytorch_lightning(lambda line: None):
        import pytorch_lightning.loggers  # noqa: F401
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.startswith("pytorch_lightning")]


def test_what_is_imported_already_stays(no_pytorch_lightning, monkeypatch):
    real = type(sys)("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", real)
    said = []
    with stand_in_for_pytorch_lightning(said.append):
        import pytorch_lightning

        assert pytorch_lightning is real
    assert sys.modules["pytorch_lightning"] is real
    assert said == []


def test_a_module_without_a_trainer():
    module, trainer = Toy(), Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert trainer_of(module) is None
    module.trainer = trainer
    assert trainer_of(module) is trainer
    assert trainer_of(None) is None


def test_setting_types():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_argument("--plain", type=int)
    types = setting_types(parser)
    assert types["plain"] is int
    assert types["trainer.fast_dev_run"] == int | bool or "trainer.fast_dev_run" in types
    assert not {"help", "trainer", "trainer.callbacks.help"} & {*types}


def test_class_settings():
    assert [*class_settings(Toy)] == ["width", "act", "fail"]
    assert class_settings(Toy)["width"] is int
    assert "params" not in class_settings(SGD)
    assert "lr" in class_settings(SGD)
    assert [*class_settings(StepLR)][:2] == ["step_size", "gamma"]
    assert "optimizer" in class_settings(PDEModule), "it has a default, so the command line does not give it"


def test_automatic_specs():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_optimizer_args((Optimizer,), "any")
    parser.add_optimizer_args(SGD, "one")
    parser.add_optimizer_args(SGD, "linked", link_to="model.optimizer")
    parser.add_lr_scheduler_args(StepLR, "scheduler")
    config = parser.parse_object({"any": {"class_path": "torch.optim.SGD"}, "one.lr": 0.5, "scheduler.step_size": 3})
    optimizers, schedulers = automatic_specs(parser, config)
    assert [*optimizers] == ["any", "one"]
    assert optimizers["any"]["class_path"] == "torch.optim.SGD"
    assert optimizers["one"]["class_path"] == "torch.optim.sgd.SGD"
    assert optimizers["one"]["init_args"]["lr"] == 0.5
    assert schedulers["scheduler"]["init_args"]["step_size"] == 3
    assert automatic_specs(parser, parser.get_defaults())[0]["any"] is None
