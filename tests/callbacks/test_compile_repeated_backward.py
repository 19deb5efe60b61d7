"""Modules that go backward more than once through one forward train as without Compile."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_ups.callbacks import Compile
from lightning_ups.order import applied
from tests.toys import Net, loader, trainer


class Facts(Callback):
    def on_train_batch_start(self, trainer, *args):
        self.facts = applied(trainer.strategy).report.parts["Compile"]


class Penalized(Net):
    """Adds the norm of the gradient with respect to its input, as a critic of WGAN-GP does."""

    def training_step(self, batch, index):
        batch = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.head(self.layers[0](batch)).sum(), batch, create_graph=True)
        return super().training_step(batch.detach(), index) + (grad.norm(dim=1) - 1).square().mean()


class TwoLosses(Net):
    """Goes backward twice through one forward."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.stem(batch)
        self.manual_backward(hidden.square().mean(), retain_graph=True)
        self.manual_backward(super().training_step(hidden, index))
        optimizer.step()


@pytest.mark.parametrize("scope", ["blocks", "auto"])
@pytest.mark.parametrize(("model", "compiles"), [(Penalized, False), (TwoLosses, True)])
def test_it_trains_as_without_compile(tmp_path, model, compiles, scope):
    torch.compiler.reset()
    ours, stock, facts = model(), model(), Facts()
    trainer(tmp_path, callbacks=[Compile(backend="aot_eager", scope=scope), facts]).fit(ours, loader(4))
    trainer(tmp_path).fit(stock, loader(4))
    assert ours.losses == stock.losses
    assert all(map(torch.equal, ours.parameters(), stock.parameters()))
    assert ("graphs" in facts.facts) is compiles
    assert compiles or "Penalized.training_step uses create_graph" in facts.facts["lines"][0]
