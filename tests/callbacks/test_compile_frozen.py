"""Parameters that are frozen for a while train as without Compile once they are unfrozen."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_ups.callbacks import Compile
from lightning_ups.transforms.compile.compiler import compiled
from lightning_ups.transforms.compile.frame import Compiler
from tests.toys import loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch.compiler.reset()


class Pair(LightningModule):
    """A backbone and a head, of which the head alone is given to the optimizer if the backbone is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, index):
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fitted(tmp_path, model, *callbacks, **options):
    trainer(tmp_path, callbacks=callbacks, **options).fit(model, loader(4))
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_a_backbone_that_lightning_unfreezes_trains(tmp_path, scope):
    def unfreeze():
        return BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.1, should_align=False, verbose=False)

    first = {name: value.tolist() for name, value in Pair().state_dict().items()}
    stock = fitted(tmp_path, Pair(), unfreeze(), epochs=3)
    ours = fitted(tmp_path, Pair(), unfreeze(), Compile(backend="aot_eager", scope=scope), epochs=3)
    assert ours == stock
    assert all(ours[name] != first[name] for name in first)


class Toggles(Pair):
    """Trains the backbone and the head in turn, as a GAN trains its halves."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.head, self.backbone)]


def test_parts_that_are_toggled_within_a_step_train(tmp_path):
    assert fitted(tmp_path, Toggles(), Compile(backend="aot_eager")) == fitted(tmp_path, Toggles())


@pytest.mark.parametrize("frozen", ["all", "one"])
def test_a_block_gets_the_gradients_of_what_was_frozen_when_it_was_compiled(frozen):
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(2, 4)
    frozen = block if frozen == "all" else block[0]
    with compiled({"block": block}, Compiler(backend="aot_eager")) as run:
        frozen.requires_grad_(False)
        block(x)
        frozen.requires_grad_(True)
        block(x).sum().backward()
        assert all(p.grad is not None for p in block.parameters())
        graphs = run.facts["graphs"]
        for flag in (False, True):
            frozen.requires_grad_(flag)
            block(x)
        assert run.facts["graphs"] == graphs == 2  # one for each set of parameters that are trained
