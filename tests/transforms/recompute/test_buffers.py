from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.buffers import Buffers
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


def test_tensors_without_data_are_taken_to_change():
    with torch.device("meta"):
        norm = nn.BatchNorm1d(2)
        before = []
        Buffers(norm).run(before, lambda: norm(torch.ones(2, 2)))
    assert len(before) == 3
