from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_ups.transforms.recompute import recompute
from lightning_ups.transforms.recompute_held import Held
from tests.transforms.contract import assert_same


class Stepped(nn.Module):
    """Calls a module with weights that are a step of its own ahead, as meta-learning does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1, affine=False))

    def forward(self, x):
        own = dict(self.net.named_parameters())
        ahead = {name: p - 0.1 * p.sin() for name, p in own.items()} | dict.fromkeys(["3.running_mean"], torch.ones(1))
        return functional_call(self.net.eval(), ahead, (x,)).square().mean()


def gradients(net, *outputs):
    return [*torch.autograd.grad(sum(outputs), [*net.parameters()])]


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_a_module_that_is_called_with_other_weights_is_recomputed_with_these(save):
    model, x = Stepped(), torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = gradients(model, model(x), model.net(x).mean())
    with recompute([model.net], save=save):
        for _ in range(2):  # the first is measured, the second is not
            assert_same(gradients(model, model(x), model.net(x).mean()), expected)
    assert not model.net[3].running_mean.any()


def test_second_derivatives_go_through_the_weights_that_a_module_was_called_with():
    model, x = Stepped(), torch.linspace(-1, 1, 12).reshape(3, 4)

    def second():
        first = torch.autograd.grad(model(x), [*model.net.parameters()], create_graph=True)
        ahead = {name: p - g for (name, p), g in zip(model.net.named_parameters(), first, strict=True)}
        return gradients(model, functional_call(model.net, ahead, (x,)).square().mean())

    expected = second()
    with recompute([model.net], save="nothing"):
        assert_same(second(), expected)


class Caching(nn.Module):
    """Makes a buffer where it has none, as positions and grids are made for the first size."""

    def __init__(self, *, declared):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        if declared:
            self.register_buffer("bias", None, persistent=False)

    def forward(self, x):
        bias = getattr(self, "bias", None)
        if bias is None:
            bias = torch.arange(8.0)
            self.register_buffer("bias", bias, persistent=False)
        else:
            bias = bias[:8]
        return (self.linear(x) * bias).tanh()


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_a_buffer_that_the_first_forward_makes_is_made_again_and_stays(save, declared):
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    block = Caching(declared=declared)
    expected = gradients(block, block(x).sum(), block(x).sum())
    block = Caching(declared=declared)
    with recompute([block], save=save):
        assert_same(gradients(block, block(x).sum(), block(x).sum()), expected)
    assert block.bias.shape == (8,)


def test_an_error_in_the_second_run_leaves_the_tensors_of_now():
    block, before = nn.Linear(2, 2), []
    other = nn.Parameter(torch.ones(2, 2))
    held, own = Held(block), block.weight
    held.run(before, partial(block, torch.ones(1, 2)))
    block.weight = other

    def fail():
        assert block.weight is own
        raise KeyError

    with pytest.raises(KeyError):
        held.run(before, fail)
    assert block.weight is other
