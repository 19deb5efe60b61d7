"""A change that keeps parameters from training is an error, and whatever else has no gradient is none."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torchmetrics import MeanMetric

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import Declaration, Stage
from lightning_ups.transforms.forward import replaced_forward
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch.compiler.reset()


class Backbone(Net):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def training_step(self, batch, index):
        return super().training_step(self.backbone(batch), index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def unfreezing():
    return BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.1, should_align=False, verbose=False)


def fitted(tmp_path, model, *callbacks, epochs=3, size=2, **options):
    random.seed(1)
    torch.manual_seed(1)
    fitting = trainer(tmp_path, callbacks=callbacks, epochs=epochs, **options)
    fitting.fit(model, loader(size))
    return {
        "losses": [loss.item() for loss in model.losses],
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "logged": {name: value.item() for name, value in fitting.logged_metrics.items()},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
    }


class Change(Declaration):
    """A change of ours that goes wrong."""

    stage = Stage.RECOMPUTE

    def __init__(self, replace):
        self.replace = replace

    def change(self, module, context):
        return replaced_forward(module.layers[1], self.replace)


def copied(forward):
    """Compute with a copy of the weight that gets its gradient, and never hands it on."""
    copies = {}

    def run(module, x):
        first = module[0]
        weight = copies.setdefault(first, nn.Parameter(first.weight.detach().clone()))
        return module[2](module[1](nn.functional.linear(x, weight, first.bias)))

    return run


def test_a_copy_that_keeps_its_gradient_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"^layers\.1\.0\.weight of Net get no gradient because of"):
        fitted(tmp_path, Net(), Change(copied))


def frozen(forward):
    """Keep what ran while everything was frozen, as a graph without a backward is kept."""
    kept = []

    def run(module, x):
        if not any(p.requires_grad for p in module.parameters()):
            kept.append(module)
        with torch.no_grad() if kept else nullcontext():
            return forward(module, x)

    return run


class OfBackbone(Change):
    def change(self, module, context):
        return replaced_forward(module.backbone, self.replace)


def test_a_forward_that_stays_frozen_is_an_error_after_the_unfreeze(tmp_path):
    model = Backbone()
    with pytest.raises(RuntimeError, match=r"^backbone\.0\.weight, backbone\.0\.bias, .* get no gradient because of"):
        fitted(tmp_path, model, unfreezing(), OfBackbone(frozen))
    assert model.trainer.current_epoch == 1


def test_a_graph_that_stays_frozen_is_an_error_of_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamo, "guarding_each_parameter", nullcontext)
    run = torch.compile(nn.Linear(2, 2).requires_grad_(False), backend="eager")
    run(torch.ones(1, 2))
    run.requires_grad_(True)
    torch_forgets = not run(torch.ones(1, 2)).requires_grad  # torch 2.11 does
    match = r"^backbone\.0\.weight, .* because of Compile\."
    with pytest.raises(RuntimeError, match=match) if torch_forgets else nullcontext():
        fitted(tmp_path, Backbone(), unfreezing(), Compile(backend="aot_eager", scope="model"))


class Loses(Declaration):
    stage = Stage.OPTIMIZERS

    def wrap(self, optimizer, context):
        optimizer.param_groups.pop()
        return optimizer


class TwoGroups(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": part.parameters()} for part in (self.layers, self.head)], lr=0.1)


def test_an_optimizer_that_lost_a_group_is_an_error_before_the_first_step(tmp_path):
    model = TwoGroups()
    with pytest.raises(RuntimeError, match=r"^head\.weight, head\.bias of TwoGroups would not train"):
        fitted(tmp_path, model, Loses())
    assert model.losses == []


# What has no gradient with stock Lightning either, and trains as with it.


RUNS = []  # of `training_step`, whoever called it


class Noisy(Net):
    """Whatever another forward could disturb."""

    def __init__(self):
        super().__init__()
        self.norm, self.metric, self.calls = nn.BatchNorm1d(8), MeanMetric(), []

    def training_step(self, batch, index):
        self.calls.append(index)
        RUNS.append(index)
        loss = super().training_step(nn.functional.dropout(self.norm(batch + torch.rand(8)), 0.3), index)
        self.metric.update(loss.detach())
        self.log_dict({"loss": loss, "metric": self.metric}, on_step=True, on_epoch=True)
        return loss


class Experts(Noisy):
    """Never runs one of its layers, and one by chance."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.drawn = nn.Linear(8, 8)

    def training_step(self, batch, index):
        if random.random() < 0.2:
            batch = self.drawn(batch)
        return super().training_step(batch, index)


class Frozen(Noisy):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)


class Closures(Noisy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class Skips(Noisy):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index % 2 else loss


class Adversarial(Noisy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        optimizers: Any = self.optimizers()
        for optimizer in optimizers if index % 4 else optimizers[:1]:
            self.toggle_optimizer(optimizer)
            if index % 3 == 0:
                optimizer.zero_grad()
            loss = super().training_step(batch, index) + self.critic(batch).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        halves = ([*self.layers.parameters(), *self.head.parameters()], self.critic.parameters())
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class Turns(Noisy):
    """Trains its layers in turn, each for several steps."""

    def training_step(self, batch, index):
        self.layers[0].requires_grad_(index % 4 == 0)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Experts, {}),
        (Experts, {"accumulate_grad_batches": 2}),
        (Frozen, {}),
        (Closures, {}),
        (Skips, {}),
        (Adversarial, {}),
        (Turns, {}),
        (Backbone, {"unfreezes": True}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, dict) else None),
)
@pytest.mark.parametrize("part", [Compile, ActivationCheckpoint])
def test_what_stock_leaves_without_a_gradient_is_no_error(tmp_path, model, options, part):
    options = dict(options)
    unfreezes = options.pop("unfreezes", False)
    callbacks = [[unfreezing()] if unfreezes else [] for _ in range(2)]
    ours = part(backend="aot_eager") if part is Compile else part()
    stock = fitted(tmp_path, model(), *callbacks[0], **options)
    RUNS.clear()
    assert fitted(tmp_path, model(), *callbacks[1], ours, **options) == stock
    assert model is not Experts or len(RUNS) > 12  # it was tried without our change, and left no trace


class NeverStepped(Adversarial):
    def training_step(self, batch, index):
        optimizer: Any = self.optimizers()[0]
        optimizer.zero_grad()
        self.manual_backward(self.head(batch).square().mean())
        optimizer.step()


@pytest.mark.parametrize(("model", "steps"), [(Net, 4), (NeverStepped, 204)])
def test_batches_are_kept_no_longer_than_parameters_are_watched(tmp_path, model, steps):
    model, keeps = model(), []
    model.on_train_batch_end = lambda *_: keeps.append("training_step" in vars(model.trainer.strategy))
    fitted(tmp_path, model, ActivationCheckpoint(), epochs=steps // 4)
    assert not keeps[-1]
    assert model.__class__ is Net or keeps[50]
