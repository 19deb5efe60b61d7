"""Code of a manual step that clears, clips and turns gradients itself, those of parameters of the module's own too."""

import pytest
import torch
from torch import nn

from tests.strategies.cases import CASES, WIDTH, Case, on_ranks, simply_on_ranks, train


class ByHand(Case):
    """A loss whose weights go up while the network goes down, as in self-adaptive physics-informed losses."""

    automatic_optimization = False

    def build(self):
        super().build()
        self.weights = nn.Parameter(torch.ones(WIDTH))  # of no called module: gathered for the whole step

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        for part in (batch, -batch):
            loss = (self.weights * (self.run(part) - part).square()).mean()
            if part is batch:
                self.clear(optimizer)
            self.manual_backward(loss)
        self.losses.append(loss.detach())
        self.change()
        optimizer.step()

    def clear(self, optimizer):
        optimizer.zero_grad()

    def change(self):
        pass


class ClearedByTheModule(ByHand):
    def clear(self, optimizer):
        self.zero_grad()


class ClearedByHand(ByHand):
    def clear(self, optimizer):
        for p in self.parameters():
            p.grad = None


class Clipped(ByHand):
    def change(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Turned(ByHand):
    def change(self):
        self.weights.grad.neg_()


class Replaced(ByHand):
    def change(self):
        self.weights.grad = 0.1 * self.weights.grad


class AskedBetween(ByHand):
    """A gradient of what was given, as attributions and balanced losses ask, while others wait for the step."""

    def change(self):
        x = torch.ones(2, WIDTH, requires_grad=True)
        (towards,) = torch.autograd.grad((self.weights * self.run(x)).sum(), x)
        self.weights.grad += towards.mean()


KINDS = {kind.__name__: kind for kind in (ClearedByTheModule, ClearedByHand, Clipped, Turned, Replaced, AskedBetween)}


def trained(tmp_path, run, name, strategy):
    CASES[name] = KINDS[name]
    return run(name, tmp_path, strategy, 2, {})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("run", "strategy"),
    [(on_ranks, {}), (on_ranks, {"sharding": "none"}), (simply_on_ranks, {})],
    ids=["fsdp2", "fsdp2 none", "simple_fsdp"],
)
def test_what_a_step_does_to_gradients_counts(ranks, tmp_path, run, strategy, name):
    CASES[name] = KINDS[name]
    found, wanted = ranks(trained, tmp_path, run, name, strategy), train(name, tmp_path)[2]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-4, atol=1e-5)
