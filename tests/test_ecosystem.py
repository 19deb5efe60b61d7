"""What docs/guides/ecosystem.md says of torchmetrics, and of settings that Hydra makes."""

import re
from collections import UserList
from inspect import signature
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_ups.callbacks import AccelerationFlags, ActivationCheckpoint, Compile
from lightning_ups.precision import BF16Precision
from tests.test_docs import resolve
from tests.toys import Net, loader, trainer


class Measured(Net):
    def __init__(self):
        super().__init__()
        self.errors = MetricCollection({"squared": MeanSquaredError(), "absolute": MeanAbsoluteError()})
        self.running = self.errors.clone(prefix="running_")

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        predicted = self.head(batch).squeeze(-1).detach().float()
        target = batch.mean(-1)
        self.log_dict(self.errors(predicted, target))
        self.running.update(predicted, target)
        self.log_dict(self.running, on_step=False, on_epoch=True)
        return loss


def logged(tmp_path, **options):
    """Return all that was logged, and the losses."""
    module, run = Measured(), trainer(tmp_path, epochs=3, log_every_n_steps=1, **options)
    run.logger = CSVLogger(tmp_path, name=None)
    run.fit(module, loader(4))
    return Path(run.logger.experiment.metrics_file_path).read_text(), [loss.item() for loss in module.losses]


@pytest.mark.filterwarnings("ignore")
def test_collections_log_the_same_with_a_preset_as_without(tmp_path):
    plain = logged(tmp_path / "plain", precision="bf16-mixed")
    callbacks = [Compile(backend="aot_eager"), ActivationCheckpoint(save="matmuls")]
    assert logged(tmp_path / "ours", plugins=[BF16Precision()], callbacks=callbacks) == plain
    assert {"squared", "absolute", "running_squared"} <= {*plain[0].partition("\n")[0].split(",")}
    assert plain[0].count("\n") > 6, "each step has a row"


class One(Net):
    def __init__(self, options, gather):
        super().__init__()
        self.metric = MeanSquaredError(dist_sync_fn=gather, distributed_available_fn=lambda: True)
        self.options = options

    def training_step(self, batch, index):
        self.metric(batch, batch)
        self.log("error", self.metric, **self.options)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({"on_step": True, "on_epoch": False}, 0),
        ({"on_step": False, "on_epoch": True}, 2 * 2),  # two states in each of two epochs
        ({"on_step": True, "on_epoch": True}, 2 * 2),
    ],
)
def test_a_logged_metric_gathers_its_states_once_an_epoch(tmp_path, options, gathers):
    gathered = []

    def gather(state, group):
        gathered.append(state)
        return [state]

    callbacks = [Compile(backend="aot_eager")]
    trainer(tmp_path, epochs=2, plugins=[BF16Precision()], callbacks=callbacks).fit(One(options, gather), loader(2))
    assert len(gathered) == gathers


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("validate", [True, False])
def test_checks_of_arguments_read_the_batch(validate):
    metric = MulticlassAccuracy(num_classes=3, validate_args=validate)
    with Operators() as operators:
        metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))
    assert bool({"aten::_unique2", "aten::unique_dim", "aten::_local_scalar_dense"} & operators.seen) == validate


def test_lists_that_are_no_list_are_accepted(tmp_path):
    callbacks = [
        Compile(blocks=UserList(["layers.*"]), backend="aot_eager"),
        AccelerationFlags(attention=UserList(["flash", "math"])),
    ]
    module = Net()
    trainer(tmp_path, plugins=[BF16Precision(in_float32=UserList(["head"]))], callbacks=callbacks).fit(module, loader())
    assert all(module.seen)


def test_hydra_files_of_the_page_name_what_exists():
    text = (Path(__file__).parent.parent / "docs" / "guides" / "ecosystem.md").read_text()
    targets = []
    for block in re.findall(r"```text\n(.*?)```", text, re.S):
        tree = yaml.safe_load(block)
        targets += [*tree.get("plugins", ()), *(value for value in tree.values() if isinstance(value, dict))]
    assert len(targets) == 3
    for target in targets:
        signature(resolve(target.pop("_target_"))).bind(**target)
