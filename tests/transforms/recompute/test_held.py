from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_ups.transforms.recompute.held import Held
from lightning_ups.transforms.recompute.wrapping import recompute
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


class Modes(nn.Module):
    """Has what goes by a mode, what may be frozen, and what it keeps and counts as plain attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.last, self.h, self.calls = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.calls += 1
        if self.h is not None:
            x = x + self.h
        y = self.last(self.drop(self.norm(self.first(x)).tanh()).sin()) * self.calls
        self.h = y.detach().mean(0)
        self.made = True
        return y


def of_modes(between, context):
    """Return losses, gradients and what the block has, where `between` is done between forward and backward."""
    block, x, seen = Modes(), torch.linspace(-1, 1, 16).reshape(4, 4), []
    with context([block]):
        for _ in range(3):
            torch.manual_seed(1)
            loss = block(x).square().sum()
            undo = between(block)
            loss.backward()
            undo()
            seen += [
                loss.detach(),
                *(p.grad.clone() for p in block.parameters() if p.grad is not None),
                block.h,
                torch.tensor(block.calls),
            ]
    return seen


def evaluating(block):
    block.eval()
    return block.train


def freezing(block):
    block.last.requires_grad_(False), block.first.requires_grad_(False)
    return lambda: (block.last.requires_grad_(True), block.first.requires_grad_(True))


def forgetting(block):
    before, block.h, block.calls = (block.h, block.calls), torch.ones(4), 9
    del block.made

    def undo():
        assert not hasattr(block, "made")
        assert block.calls == 9
        block.h, block.calls = before

    return undo


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("between", [evaluating, freezing, forgetting])
def test_the_second_run_has_the_modes_flags_and_attributes_of_the_first(between, save):
    expected = of_modes(between, nullcontext)
    assert_same(of_modes(between, partial(recompute, save=save)), expected)


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_what_is_frozen_in_the_forward_alone_gets_no_gradient(save):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(4, 4, requires_grad=True)
    block.requires_grad_(False)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    with recompute([block], save=save):
        loss = block(x).sum()
        block.requires_grad_(True)
        loss.backward()
    assert torch.equal(x.grad, expected)
    assert all(p.grad is None and p.requires_grad for p in block.parameters())


def test_modules_that_note_how_far_they_are_keep_their_notes():
    class Notes(nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

        def forward(self, x):
            self.ready = True
            return super().forward(x)

    block, before = Notes(2, 2), []
    held = Held(block)
    held.run(before, partial(block, torch.ones(1, 2)))
    block.eval()
    assert held.run(before, lambda: (block.ready, block.training)) == (True, True)
    assert (block.ready, block.training) == (True, False)


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
