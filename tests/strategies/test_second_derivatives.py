"""Losses with derivatives of derivatives, as gradient penalties and physics-informed networks have them."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.strategies.cases import CASES, WIDTH, Case, on_ranks, simply_on_ranks, train, two_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Physics(Case):
    """Fits a heat equation."""

    def build(self):
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, _):
        x = batch.detach().requires_grad_()
        u = self.run(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        loss = (slope[:, 1] - 0.1 * bend[:, 0]).square().mean() + (u - 1).square().mean()
        self.losses.append(loss.detach())
        return loss


class Penalty(Case):
    """Bounds the slope of what it computes; only its backward meets what was freed."""

    def build(self):
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x):
        return self.head(self.layers(x))

    def training_step(self, batch, _):
        x = batch.detach().requires_grad_()
        u = self.run(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = slope.square().mean() + (u - 1).square().mean()
        self.losses.append(loss.detach())
        return loss


class ByHand(Penalty):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class Balanced(Case):
    """Weighs two losses by the norms of their gradients for the last layer."""

    def training_step(self, batch, _):
        u = self.run(batch)
        first, second = u.square().mean(), (u - 1).abs().mean()
        one, other = (torch.autograd.grad(loss, self.head.weight, retain_graph=True)[0] for loss in (first, second))
        loss = first + (one.norm() / other.norm()).detach() * second
        self.losses.append(loss.detach())
        return loss


CASES["Physics"], CASES["Penalty"], CASES["ByHand"], CASES["Balanced"] = Physics, Penalty, ByHand, Balanced


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train("Physics", tmp_path_factory.mktemp("plain"))[2]["losses"]


def test_recomputed_they_are_the_same(plain, tmp_path):
    assert train("Physics", tmp_path, callbacks=[ActivationCheckpoint(save="nothing")])[2]["losses"] == plain


@pytest.mark.parametrize("weights", ["masters", "autocast"])
def test_in_bfloat16_they_are_near(weights, plain, tmp_path):
    found = train("Physics", tmp_path, plugins=[BF16Precision(weights=weights)])[2]["losses"]
    assert found == pytest.approx(plain, rel=0.05)


def ddp(tmp_path):
    return train("Physics", tmp_path, strategy="ddp", ranks=2)[2]["losses"]


def test_ddp_trains_them(ranks, plain, tmp_path):
    assert ranks(ddp, tmp_path) == pytest.approx(plain, rel=1e-5)


def test_compile_says_so_where_it_has_to_compile(tmp_path):
    with pytest.raises(RuntimeError) as error:
        train("Physics", tmp_path, callbacks=[Compile(backend="aot_eager", on_failure="raise")])
    (note,) = error.value.__notes__
    assert note.startswith("The gradient of a gradient was asked for (create_graph=True")
    assert re.search(r"Compiled code can be differentiated once.*or leave Compile out\.", note)


@pytest.mark.parametrize("callback", [Compile(backend="aot_eager"), ActivationCheckpoint()])
def test_callbacks_adapt_by_default(callback, plain, tmp_path):
    assert train("Physics", tmp_path, callbacks=[callback])[2]["losses"] == pytest.approx(plain)


def simply(name, tmp_path):  # ranks import this file with it, and so know its cases
    return simply_on_ranks(name, tmp_path, {}, 2, {})


@pytest.mark.parametrize("name", ["Physics", "Penalty", "ByHand"])
def test_by_tensor_code_they_are_computed_uncompiled(name, ranks, tmp_path):
    losses = ranks(simply, name, tmp_path)["losses"]
    assert losses == pytest.approx(train(name, tmp_path)[2]["losses"], rel=1e-5)


def as_one_graph(name, tmp_path, *_):
    callbacks = [Compile(backend="aot_eager", on_failure="raise")]
    return on_ranks(name, tmp_path, SimpleFSDPStrategy(), 2, {"callbacks": callbacks})


def failing(tmp_path, name, run):
    try:
        run(name, tmp_path, {}, 2, {})
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]


def test_a_graph_knows_one_backward_and_says_so(ranks, tmp_path):
    said = ranks(failing, tmp_path, "Physics", as_one_graph)
    assert len(said) == 2
    assert said[-1].count("create_graph=True") == 1
    assert said[-1].endswith("Use strategy='ddp'.")


class Adaptive(nn.Module):
    """Has a weight that backward reads element by element, of which torch does not say that it was freed."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.sin(x * self.rate)


class Steeper(Physics):
    """Computes a second time, without derivatives, before the backward of the loss."""

    def build(self):
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Adaptive()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.run(batch + 1).square().mean()


class Ahead(Case):
    """Takes the loss of weights that are a step of gradients ahead, as meta-learning does."""

    def training_step(self, batch, _):
        own = dict(self.layers[0].named_parameters())
        first = torch.autograd.grad(self.layers[0](batch).square().mean(), [*own.values()], create_graph=True)
        ahead = {name: p - 0.1 * gradient for (name, p), gradient in zip(own.items(), first, strict=True)}
        loss = torch.func.functional_call(self.layers[0], ahead, (batch,)).square().mean() + self.run(batch).mean()
        self.losses.append(loss.detach())
        return loss


class ByHandAndWhole(ByHand):
    """Asks for a graph in the backward that brings the gradients, and makes nothing of it."""

    def manual_backward(self, loss, *args, **kwargs):
        super().manual_backward(loss, *args, create_graph=True, **kwargs)


CASES["Steeper"], CASES["Ahead"], CASES["ByHandAndWhole"] = Steeper, Ahead, ByHandAndWhole


def trained(tmp_path, name, strategy, **options):
    return train(name, tmp_path, strategy=strategy, ranks=2, **options)[2]


def assert_alike(ours, others):
    torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-6)


@two_ranks
@pytest.mark.parametrize("strategy", [{}, {"sharding": "gradients"}, {"sharding": "none"}], ids=str)
@pytest.mark.parametrize("name", ["Physics", "Penalty", "ByHand", "Steeper", "Ahead"])
def test_shards_stay_gathered_for_them(tmp_path, name, strategy):
    assert_alike(trained(tmp_path, name, FSDP2Strategy(**strategy)), trained(tmp_path, name, "ddp"))


@two_ranks
@pytest.mark.parametrize("sync", ["last", "every"])
def test_shards_stay_gathered_for_them_in_each_microbatch(tmp_path, sync):
    ours, ddp = (trained(tmp_path, "Steeper", each, accumulate=2) for each in (FSDP2Strategy(sync=sync), "ddp"))
    assert_alike(ours, ddp)


@two_ranks
def test_a_backward_that_makes_a_graph_and_brings_gradients_is_that_of_a_loss(tmp_path):
    assert_alike(*(trained(tmp_path, name, FSDP2Strategy()) for name in ("ByHandAndWhole", "ByHand")))


class Idle(Case):
    """Looks at slopes, of which the loss knows nothing."""

    def training_step(self, batch, index):
        x = batch.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.run(x).sum(), x, create_graph=True)
        self.losses.append(slope.detach().square().mean())
        return self.run(x).square().mean()


CASES["Idle"] = Idle


@two_ranks
def test_nothing_stays_gathered_between_steps(tmp_path):
    model = train("Idle", tmp_path, strategy=FSDP2Strategy(), ranks=2)[0]
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks], ids=["fsdp2", "simple_fsdp"])
def test_a_gradient_of_a_shard_is_an_error_with_a_cure(run, ranks, tmp_path):
    said = ranks(failing, tmp_path, "Balanced", run)[0]
    assert re.search(r"a gradient that the graph does not have.*use strategy='ddp'", said)
