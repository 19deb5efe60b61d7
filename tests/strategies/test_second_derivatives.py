"""Losses with derivatives of derivatives, as gradient penalties and physics-informed networks have them."""

import re

import pytest
import torch
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.precision import BF16Precision
from tests.strategies.cases import CASES, WIDTH, Case, on_ranks, simply_on_ranks, train

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
        return slope.square().mean() + (u - 1).square().mean()


class ByHand(Penalty):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, index))


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


@pytest.mark.parametrize(
    ("callback", "cure"),
    [
        (Compile(backend="aot_eager"), r"Compiled code can be differentiated once.*or leave Compile out\."),
        (ActivationCheckpoint(save="matmuls"), r"\(save='matmuls'\) keeps is for one backward\. Use save='nothing'\."),
    ],
)
def test_what_knows_one_backward_says_so(callback, cure, tmp_path):
    with pytest.raises(RuntimeError) as error:
        train("Physics", tmp_path, callbacks=[callback])
    (note,) = error.value.__notes__
    assert note.startswith("The gradient of a gradient was asked for (create_graph=True")
    assert re.search(cure, note)


def failing(tmp_path, name, run):
    try:
        run(name, tmp_path, {}, 2, {})
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]


@pytest.mark.parametrize("name", ["Physics", "Penalty", "ByHand"])
@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks], ids=["fsdp2", "simple_fsdp"])
def test_shards_know_one_backward_and_say_so(name, run, ranks, tmp_path):
    said = ranks(failing, tmp_path, name, run)
    assert len(said) == (1 if run is on_ranks else 2)
    assert said[-1].count("create_graph=True") == 1
    assert said[-1].endswith("Use strategy='ddp'.")


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks], ids=["fsdp2", "simple_fsdp"])
def test_a_gradient_of_a_shard_is_told_from_one_of_what_was_not_used(run, ranks, tmp_path):
    said = ranks(failing, tmp_path, "Balanced", run)[0]
    assert re.search(r"is a shard; allow_unused=True would give None.*use strategy='ddp'", said)
