"""A device whose copies are late, and small models that are trained with state here or there."""

import weakref

import torch
from torch import nn

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer
from lightning_ups.optim.offload.memory import Memory

POISON = 255  # every float type reads it as not a number


class LateMemory(Memory):
    """Makes a copy only when someone waits for it, and counts what is where."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.on_host = self.on_device = self.peak = 0
        self.late = []  # copies that are not made yet, oldest first
        self.loads = self.stores = 0

    def host(self, nbytes):
        self.on_host += nbytes
        return super().host(nbytes)

    def room(self, nbytes):
        memory = super().room(nbytes).fill_(POISON)
        self.on_device += nbytes
        self.peak = max(self.peak, self.on_device)
        weakref.finalize(memory, self._freed, nbytes)
        return memory

    def _freed(self, nbytes):
        self.on_device -= nbytes

    def load(self, copies, *, after=()):
        self.loads += 1
        return self._later(list(copies), after, poison=True)

    def store(self, copies, *, after=()):
        self.stores += 1
        return self._later(list(copies), after, poison=False)

    def _later(self, copies, after, *, poison):
        mark = {"copies": copies, "after": [m for m in after if m is not None], "poison": poison}
        self.late.append(mark)
        return mark

    def wait(self, mark):
        self.reach(mark)

    def reach(self, mark):
        if mark is None or not any(mark is other for other in self.late):
            return
        for before in mark["after"]:
            self.reach(before)
        self.late = [other for other in self.late if other is not mark]
        for to, source in mark["copies"]:
            to.copy_(source)
        mark["copies"] = []

    def settle(self):
        while self.late:
            self.reach(self.late[0])


class Net(nn.Sequential):
    """Matrices and vectors; the first matrix has most of the elements."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8), nn.LayerNorm(8))


def grouped(kind, **options):
    """Return a function that makes an optimizer with two groups."""

    def make(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return kind([{"params": decayed}, {"params": rest, "lr": 3e-3}], lr=1e-2, **options)

    return make


def train(make, *, wrap=None, masters=False, steps=4, between=None, freeze_at=None, model=Net):
    """Return the weights after some steps, and the optimizer that made them."""
    model, held = model(), None
    optimizer = make(model)
    if masters:
        held = MasterWeights(model, dtype=torch.bfloat16)
        optimizer = MasteredOptimizer(optimizer, held)
    if wrap is not None:
        optimizer = wrap(optimizer)
    inputs = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(4, 64, generator=inputs).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        if freeze_at == step:
            model[2].weight.grad = None
        if between is not None:
            between(step, model, optimizer)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_same_state(one, other):
    """Compare two state dicts of optimizers, bit for bit."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, entries in one["state"].items():
        assert entries.keys() == other["state"][key].keys()
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][key][name])), (key, name)


def offloaded(memory=None, **way):
    """Return a function that offloads the state of an optimizer to a memory whose copies are late."""
    return lambda optimizer: OffloadedOptimizer(optimizer, memory=memory or LateMemory(), **way)


def compare(make, *, way, memory=None, **options):
    """Train with the state offloaded and without, assert that nothing differs, and return the offloaded optimizer."""
    right, plain = train(make, **options)
    result, ours = train(make, wrap=offloaded(memory, **way), **options)
    assert_same(result, right)
    assert_same_state(ours.state_dict(), plain.state_dict())
    return ours
