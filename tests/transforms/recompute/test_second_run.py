import random
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.second_run import Buffers, Held, run_with_drawn
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.transforms.contract import assert_same, grads


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


def spectral():
    return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())


class Codebook(nn.Module):
    """Moves its buffer behind autograd's back, and puts another tensor in place of a second."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x):
        x = (self.linear(x) * self.mean * self.constant).tanh()
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.step = self.step + 1
        return x + self.step


class Plain(nn.Module):
    """Has tensors as plain attributes, and writes to one of them."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.table = nn.Linear(8, 8), torch.ones(8), torch.ones(8)

    def forward(self, x):
        x = (self.linear(x) * self.seen * self.table).tanh()
        self.seen.data.mul_(0.9).add_(x.detach().mean(0))
        self.last = x  # a result, of which there is another each time
        return x.sin()


def unchanged(model):
    return nullcontext()


def compiled_blocks(model, **options):
    return compiled({str(i): block for i, block in enumerate(model)}, Compiler(backend="aot_eager", **options))


def trained(make, *, change, context=unchanged):
    torch.manual_seed(0)
    model, x, losses = nn.Sequential(make(), make()), torch.randn(4, 8), []
    with change(model), context(model):
        for step in range(3):
            model.eval() if step == 1 else model.train()
            losses += grads(model, x)
    return [*losses, *model.buffers(), *(layer.seen for layer in model if isinstance(layer, Plain))]


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("make", [normed, spectral, Codebook, Plain])
def test_buffers_move_once_and_the_second_run_has_those_of_the_first(make, save):
    assert_same(trained(make, change=partial(recompute, save=save)), trained(make, change=unchanged))


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_compiled_buffers_move_once(save):
    expected = trained(normed, change=unchanged, context=compiled_blocks)
    actual = trained(normed, change=partial(recompute, save=save), context=compiled_blocks)
    torch.testing.assert_close(actual, expected)


class Broken(nn.Module):
    """Breaks the graph, so that its checkpoint runs uncompiled although it is compiled."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        torch._dynamo.graph_break()  # noqa: TID251
        return self.norm(x).tanh()


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Broken()

    def forward(self, x):
        return self.inner(self.linear(x)).exp()


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_buffers_move_once_where_a_graph_break_leaves_the_checkpoint_uncompiled(save):
    expected = trained(Around, change=unchanged)
    change = partial(recompute_inner, save=save)
    torch.testing.assert_close(trained(Around, change=change, context=compiled_blocks), expected)


def recompute_inner(model, *, save):
    return recompute([block.inner for block in model], save=save)


class Neighbours(nn.Module):
    """Sums what the neighbours in a graph have, by a sparse matrix; another one, that it is given, grows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("matrix", torch.eye(4).to_sparse_coo())
        self.register_buffer("other", torch.eye(4).to_sparse_coo())

    def forward(self, x):
        x = (self.matrix + self.other) @ self.linear(x).tanh()
        self.other.mul_(2)
        return x


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_sparse_buffers_move_once(save):
    assert_same(
        [t.to_dense() for t in trained(Neighbours, change=partial(recompute, save=save))],
        [t.to_dense() for t in trained(Neighbours, change=unchanged)],
    )


def test_buffers_that_stay_are_copied_once_and_no_more():
    block = Codebook()
    buffers, before = Buffers(block), []
    buffers.run(before, lambda: block(torch.ones(2, 8)))
    assert [taken.name for taken in before] == ["mean", "step"]
    assert torch.equal(before[0].value, torch.ones(8))
    second = []
    buffers.run(second, lambda: block(torch.ones(2, 8)))
    assert [taken.name for taken in second] == ["mean", "step"]


def test_each_mode_of_training_has_its_own_buffers_that_change():
    norm = nn.BatchNorm1d(2).eval()
    buffers, before = Buffers(norm), []
    buffers.run(before, lambda: norm(torch.ones(2, 2)))
    assert before == []
    norm.train()
    buffers.run(before, lambda: norm(torch.ones(2, 2)))
    assert [taken.name for taken in before] == ["running_mean", "running_var", "num_batches_tracked"]


def test_an_error_in_the_second_run_leaves_the_buffers_of_now():
    norm = nn.BatchNorm1d(2)
    buffers, before = Buffers(norm), []
    buffers.run(before, lambda: norm(torch.ones(2, 2)))
    norm(torch.ones(2, 2))
    now = norm.running_mean.clone()

    def fail():
        assert not norm.running_mean.any()  # as at first
        raise KeyError

    with pytest.raises(KeyError):
        buffers.run(before, fail)
    assert torch.equal(norm.running_mean, now)


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


def gradients_of(net, *outputs):
    return [*torch.autograd.grad(sum(outputs), [*net.parameters()])]


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_a_module_that_is_called_with_other_weights_is_recomputed_with_these(save):
    model, x = Stepped(), torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = gradients_of(model, model(x), model.net(x).mean())
    with recompute([model.net], save=save):
        for _ in range(2):  # the first is measured, the second is not
            assert_same(gradients_of(model, model(x), model.net(x).mean()), expected)
    assert not model.net[3].running_mean.any()


def test_second_derivatives_go_through_the_weights_that_a_module_was_called_with():
    model, x = Stepped(), torch.linspace(-1, 1, 12).reshape(3, 4)

    def second():
        first = torch.autograd.grad(model(x), [*model.net.parameters()], create_graph=True)
        ahead = {name: p - g for (name, p), g in zip(model.net.named_parameters(), first, strict=True)}
        return gradients_of(model, functional_call(model.net, ahead, (x,)).square().mean())

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
    expected = gradients_of(block, block(x).sum(), block(x).sum())
    block = Caching(declared=declared)
    with recompute([block], save=save):
        assert_same(gradients_of(block, block(x).sum(), block(x).sum()), expected)
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


class Draws(nn.Module):
    """Multiplies by what it draws, and remembers that outside of itself."""

    def __init__(self, draw, drawn):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.g, self.r = torch.Generator(), random.Random(0)
        self.n, self.s = np.random.default_rng(0), np.random.RandomState(0)
        self.draw, self.drawn = draw, drawn

    def forward(self, x):
        factor = float(self.draw(self))
        self.drawn.append(factor)
        return (self.linear(x) * factor).tanh().sin()


DRAW = {
    "Python": lambda self: random.random(),
    "Python's normal": lambda self: random.gauss(0, 1),
    "NumPy": lambda self: np.random.rand(),
    "NumPy's normal": lambda self: np.random.randn(),
    "torch's": lambda self: torch.rand((), generator=self.g),
    "own of Python": lambda self: self.r.random(),
    "own of NumPy": lambda self: self.n.random(),
    "own of old NumPy": lambda self: self.s.rand(),
}


def stream(draw, between, context):
    """Return what each of three steps draws, and what is drawn after them."""
    random.seed(0), np.random.seed(0)
    block, steps = Draws(draw, []), []
    with context([block]):
        for _ in range(3):
            losses = [block(torch.ones(2, 4)).sum() for _ in range(2)]
            for _ in range(between):
                draw(block)
            losses[1].backward(), losses[0].backward()
            steps.append([*block.drawn])
            block.drawn.clear()
    return steps, float(draw(block))


@pytest.mark.parametrize("between", [0, 1, 700])  # the Mersenne Twister has 624 numbers
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW.keys())
def test_the_second_run_draws_what_the_first_did_and_the_stream_goes_on(draw, save, between):
    expected, after = stream(draw, between, nullcontext)
    steps, same = stream(draw, between, partial(recompute, save=save))
    assert same == after
    assert steps == [[first, second, second, first] for first, second in expected]  # backward begins at the last


def test_a_number_of_numpy_that_is_left_over_is_used_up_again():
    np.random.seed(0)
    np.random.randn()  # leaves the second of a pair
    run_with_drawn([], [], lambda: None)  # sees that there is one
    np.random.randn()  # uses it up, by which the twister does not move
    expected = np.random.get_state()
    drawn = []
    run_with_drawn(before := [], [], lambda: drawn.append(np.random.randn()))
    np.random.rand()
    run_with_drawn(before, [], lambda: drawn.append(np.random.randn()))
    np.random.set_state(expected)
    assert drawn == [np.random.randn()] * 2


def test_an_error_in_the_second_run_leaves_the_stream_as_it_was():
    random.seed(0)
    run_with_drawn(before := [], [], random.random)

    def fail():
        random.random()
        raise KeyError

    expected = random.Random(0)
    expected.random()
    with pytest.raises(KeyError):
        run_with_drawn(before, [], fail)
    assert random.random() == expected.random()


@pytest.mark.parametrize("bits", [None, "PCG64"])
def test_another_generator_behind_numpy_is_put_back_too(monkeypatch, bits):
    own = np.random.get_bit_generator()
    if bits is None:  # as before NumPy 1.24
        monkeypatch.delattr(np.random, "get_bit_generator")
    else:
        np.random.set_bit_generator(getattr(np.random, bits)(0))
    try:
        drawn = []
        run_with_drawn(before := [], [], lambda: drawn.append(np.random.rand()))
        drawn.append(np.random.rand())
        run_with_drawn(before, [], lambda: drawn.append(np.random.rand()))
    finally:
        if bits is not None:
            np.random.set_bit_generator(own)
    assert drawn[0] == drawn[2] != drawn[1]


def test_numpy_need_not_be_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    drawn = []
    run_with_drawn(before := [], [], lambda: drawn.append(random.random()))
    run_with_drawn(before, [], lambda: drawn.append(random.random()))
    assert drawn[0] == drawn[1]
