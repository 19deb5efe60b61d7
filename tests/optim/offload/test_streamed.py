import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

from lightning_ups.optim import OffloadedOptimizer
from tests.optim.offloading import LateMemory, Net, train


class Watched(LateMemory):
    """Remembers in which order copies were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def load(self, copies, *, after=()):
        self.asked.append("load")
        return super().load(copies, after=after)

    def store(self, copies, *, after=()):
        self.asked.append("store")
        return super().store(copies, after=after)


def test_the_next_is_loaded_before_one_is_stored():
    memory = Watched()
    make = lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)  # noqa: E731
    _, ours = train(make, steps=2, wrap=lambda o: OffloadedOptimizer(o, memory=memory, chunk_bytes=8192))
    chunks = len(ours.steps.chunks)
    assert chunks == 5
    # The first step finds nothing to load; the second is two loads ahead of its stores, and three slots suffice.
    assert memory.asked == ["load", "load"] + ["store", "load"] * (chunks - 2) + ["store", "store"]
    assert len(memory.late) > 0  # what was stored last is on its way while other work goes on


def test_chunks_without_a_gradient_are_not_moved():
    model, memory = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), Watched()
    ours = OffloadedOptimizer(AdamW(model.parameters()), memory=memory, chunk_bytes=40_000)
    for index in (0, 1, 1):
        for p in model[index].parameters():
            p.grad = torch.ones_like(p)
        ours.step()
        ours.zero_grad()
    assert memory.asked == ["load", "store"]
    assert ours.steps.host_bytes == 2 * 8 * (64 * 64 + 64)


def test_state_that_changes_its_form_finds_another_place():
    class Growing(SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        count = state.get("count", 0) + 1
                        state["count"] = count
                        state["history"] = torch.full((count, 2), float(count))
                        if count == 3:
                            del state["momentum_buffer"]

    make = lambda model: Growing(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    right, plain = train(make, steps=5)
    result, ours = train(make, steps=5, wrap=lambda o: OffloadedOptimizer(o, memory=LateMemory(), chunk_bytes=9999))
    for name in right:
        assert torch.equal(right[name], result[name])
    for number, entries in plain.state_dict()["state"].items():
        mine = ours.state_dict()["state"][number]
        assert torch.equal(mine["history"], entries["history"])
        assert mine["count"] == 5


def sharded(offloaded, update, masters_dtype, steps=3):
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    memory = LateMemory()
    if offloaded:
        optimizer = OffloadedOptimizer(optimizer, memory=memory, chunk_bytes=9000, update=update)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    weights = [p.full_tensor().tolist() for p in model.parameters()]
    state = optimizer.state_dict()["state"]
    averages = [entries["exp_avg"].full_tensor().tolist() for entries in state.values()]
    parts = (
        [len(c.items) for c in optimizer.steps.chunks if c.items[0].part] if update == "device" and offloaded else []
    )
    return weights, averages, len(parts), memory.loads


@pytest.mark.parametrize("update", ["device", "host"])
def test_shards_are_stepped_in_parts(ranks, update):
    weights, averages, _, _ = ranks(sharded, False, update, None)
    result, state, parts, loads = ranks(sharded, True, update, None)
    assert (result, state) == (weights, averages)
    assert loads > 0
    assert parts >= (4 if update == "device" else 0)  # 4096 elements a rank of the first matrix
