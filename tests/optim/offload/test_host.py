import torch
from torch import nn
from torch.optim import AdamW

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer
from tests.optim.offloading import LateMemory, Net, assert_same, train


class Counting(LateMemory):
    """Knows how many bytes went each way."""

    def __init__(self):
        super().__init__()
        self.up = self.down = 0

    def load(self, copies, *, after=()):
        copies = list(copies)
        self.up += sum(to.nbytes for to, _ in copies)
        return super().load(copies, after=after)

    def store(self, copies, *, after=()):
        copies = list(copies)
        self.down += sum(to.nbytes for to, _ in copies)
        return super().store(copies, after=after)


def stepped(memory, *, masters, steps):
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if masters:
        optimizer = MasteredOptimizer(optimizer, MasterWeights(model, dtype=torch.bfloat16))
    ours = OffloadedOptimizer(optimizer, update="host", memory=memory, chunk_bytes=20_000)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
    return model, ours


def test_gradients_come_down_and_parameters_go_up_and_state_does_not_move():
    numel = sum(p.numel() for p in Net().parameters())
    memory = Counting()
    stepped(memory, masters=True, steps=10)
    before = memory.up, memory.down
    _, ours = stepped(memory, masters=True, steps=11)
    assert memory.up - before[0] == 11 * 2 * numel
    # Beside the gradients, in the first steps the parameters, in case others have written into them.
    assert memory.down - before[1] == (11 + 3) * 2 * numel
    assert memory.on_device == 0
    assert ours.steps.device_bytes == 0
    assert ours.steps.host_bytes == 12 * numel + 4 * len(list(Net().parameters()))


def test_without_masters_the_parameters_come_down_too():
    numel = sum(p.numel() for p in Net().parameters())
    memory = Counting()
    stepped(memory, masters=False, steps=5)
    assert (memory.up, memory.down) == (5 * 4 * numel, 5 * 2 * 4 * numel)


def test_a_write_that_is_counted_is_found_at_any_step():
    def between(step, model, optimizer):
        if step == 6:
            with torch.no_grad():
                nn.init.ones_(model[2].weight)

    def make(model):
        return AdamW(model.parameters(), lr=1e-2)

    right, _ = train(make, masters=True, steps=8, between=between)
    wrap = lambda o: OffloadedOptimizer(o, update="host", memory=LateMemory())  # noqa: E731
    assert_same(train(make, masters=True, steps=8, between=between, wrap=wrap)[0], right)
