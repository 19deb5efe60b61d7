import weakref

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm, grads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ups._compat.lightning import sharding
from lightning_ups._compat.lightning.sharding import (
    averaged_copies,
    finetuning_by_identity,
    has_weak_references,
    keeping_attributes,
    move_all_but_parameters,
    without_inference_mode,
)
from lightning_ups.callbacks import Compile
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.toys import Net, trainer


def test_inference_mode_is_the_users_again(tmp_path):
    lightning = trainer(tmp_path, inference_mode=True)
    seen = []

    def fail():
        with without_inference_mode(lightning):
            seen.extend([lightning.validate_loop.inference_mode, lightning.predict_loop.inference_mode])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == [False, False]
    assert lightning.validate_loop.inference_mode
    assert lightning.predict_loop.inference_mode


def test_metrics_move_and_parameters_do_not():
    net = Net()
    net.metric, net.table = MeanMetric(), nn.Identity()
    net.table.register_buffer("angles", torch.zeros(2))
    move_all_but_parameters(net, torch.device("meta"))
    assert net.metric.device.type == net.table.angles.device.type == "meta"
    assert net.head.weight.device.type == "cpu"
    assert net.device.type == "meta"


def test_attributes_of_parameters_outlive_a_move():
    layer = nn.Linear(2, 2)
    layer.weight.no_decay = True
    with keeping_attributes(layer):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.weight.new = 1
    assert vars(layer.weight) == {"no_decay": True, "new": 1}


def test_weak_references_but_those_that_a_recurrent_layer_renews(monkeypatch):
    monkeypatch.setattr(sharding, "DTensor", nn.Parameter)  # as if all were sharded
    layers = nn.ModuleList([nn.GRU(2, 2), nn.GRU(2, 2), nn.Linear(2, 2)])
    assert not has_weak_references(layers)
    reference = weakref.ref(layers[2].weight)
    assert has_weak_references(layers)
    del reference
    layers[1].weight_ih_l0 = layers[0].weight_ih_l0
    assert has_weak_references(layers)


def kinds():
    mesh = init_device_mesh("cpu", (2,))
    whole, again = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    part, other = (nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)])) for _ in range(2))
    optimizer = torch.optim.SGD([whole, part], lr=0.1)
    with pytest.raises(RuntimeError, match="got mixed"):
        BaseFinetuning.filter_on_optimizer(optimizer, [again, other])
    with finetuning_by_identity():
        left = BaseFinetuning.filter_on_optimizer(optimizer, [whole, again, part, other])
    return [p is q for p, q in zip(left, [again, other], strict=True)]


def test_parameters_of_both_kinds_differ_from_equal_ones(ranks):
    assert ranks(kinds) == [True, True]


def test_copies_are_found_where_there_are_any():
    ema, swa = EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)
    assert averaged_copies([ema, swa, Callback()]) == []
    model = nn.Linear(2, 2)
    ema._average_model, swa._average_model = AveragedModel(model), nn.Linear(2, 2)
    first, second = averaged_copies([ema, swa, Callback()])
    assert torch.equal(first.weight, model.weight)
    assert second is swa._average_model


TO_TENSOR = LightningModule._LightningModule__to_tensor


class Watched(LightningModule):
    """Logs the norms of its gradients, as Lightning's documentation shows it, and that of a weight."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.types = set()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.log("norm", norms["grad_2.0_norm_total"])

    def on_train_batch_end(self, *args):
        self.log("weight", self.net[0].weight.norm(), on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.types |= {type(value) for value in self.trainer.callback_metrics.values()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def watched(tmp_path, kind):
    seed_everything(3, verbose=False)
    module, best = Watched(), ModelCheckpoint(tmp_path / "kept", monitor="weight", filename="{weight:.3f}")
    strategy = {"fsdp2": FSDP2Strategy, "simple": SimpleFSDPStrategy}[kind]() if dist.is_initialized() else "auto"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    lightning = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=2,
        callbacks=[EarlyStopping("weight"), best, *([Compile(backend="aot_eager")] if kind == "simple" else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    lightning.fit(module, DataLoader(data, batch_size=8 // ranks))
    found = {name: value.item() for name, value in lightning.callback_metrics.items()}
    kept = LightningModule._LightningModule__to_tensor is TO_TENSOR, grads.torch is torch
    return found, module.types, type(best.best_model_score), kept


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fsdp2", "simple"])
def test_norms_of_shards_are_logged_as_those_of_whole_tensors(ranks, tmp_path, kind):
    right, *_ = watched(tmp_path / "one", None)
    found, types, score, kept = ranks(watched, tmp_path / "two", kind)
    assert found == pytest.approx(right, rel=1e-4)
    assert found["norm"] > 0
    assert types == {torch.Tensor}
    assert score is torch.Tensor
    assert kept == (True, True), "Lightning has its own again"
