"""Hooks within blocks decide which blocks share a graph, since Dynamo does not look at them."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile
from lightning_ups.transforms.compile.alike_hooks import hooks_of
from tests.toys import trainer


def doubled(module, args, output):
    return output * 2


def times(factor):
    return lambda module, args, output: output * factor


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, output):
        return output * self.factor

    def method(self, module, args, output):
        return output * self.factor


def hooked(*hooks):
    layer = nn.Linear(2, 2)
    for hook in hooks:
        layer.register_forward_hook(hook)
    return hooks_of(layer)


@pytest.mark.parametrize("make", [times, Times, lambda f: Times(f).method, lambda f: partial(times(f))])
def test_hooks_are_alike_that_do_the_same(make):
    assert hooked(make(2.0)) == hooked(make(2.0))
    assert hash(hooked(make(2.0))) == hash(hooked(make(2.0)))
    assert hooked(make(2.0)) != hooked(make(3.0))
    assert hooked(make(2.0)) != hooked() != hooked(doubled)


def test_what_is_hooked_where_matters():
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(doubled)
    assert hooks_of(layer) != hooked(doubled)


def test_hooks_that_keep_something_of_their_own_are_not_alike():
    def keeping():
        seen = []
        return lambda module, args, output: seen.append(output)

    one = keeping()
    assert hooked(one) == hooked(one)
    assert hooked(one) != hooked(keeping())


def test_a_hook_that_closes_over_itself_has_an_end():
    def hook(module, args, output):
        return hook and output

    assert hooked(hook) == hooked(hook)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_of_two_layers_is_alike():
    layers = [nn.utils.weight_norm(nn.Linear(2, 2)) for _ in "ab"]
    assert hooks_of(layers[0]) == hooks_of(layers[1]) != hooks_of(nn.Linear(2, 2))


class Deep(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.losses = []

    def training_step(self, batch, _):
        for block in self.blocks:
            batch = block(batch)
        loss = batch.square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses(path, callbacks, at):
    model = Deep()
    model.blocks[at][0].register_forward_hook(doubled)
    rows = DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)
    trainer(path, callbacks=callbacks, epochs=2).fit(model, rows)
    return torch.stack(model.losses)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_hook_within_one_of_equal_blocks_runs_there_and_nowhere_else(tmp_path, at):
    compiled, plain = losses(tmp_path, [Compile(backend="aot_eager")], at), losses(tmp_path, [], at)
    assert torch.equal(compiled, plain)
