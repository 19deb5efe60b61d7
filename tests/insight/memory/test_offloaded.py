"""Offloaded memory in a dry run compared with the live memory of a real step on a CPU."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups._compat.torch.tensors.autograd import outside_modes
from lightning_ups.insight.dry_run import FakeCopies
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.insight.memory.described_run import HostMemory
from lightning_ups.insight.memory.step import StepParts, measure
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.optim.offloading import LateMemory

CPU = torch.device("cpu")
ROWS, WIDTH = 512, 64
INPUT = 4 * ROWS * WIDTH  # bytes


class Block(nn.Module):
    """Saves its input, and what is four times as wide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)))


def model(depth=6):
    return nn.Sequential(*(Block() for _ in range(depth)))


class Apart(LateMemory):
    """A host whose memory is none of the device's."""

    def __init__(self, ledger):
        super().__init__()
        self.ledger = ledger

    def host(self, nbytes):
        with outside_modes():
            memory = super().host(nbytes)
        self.ledger.leave_out(memory)
        return memory


SETTINGS = {
    "all": {},
    "every second": {"every": 2},
    "large ones": {"min_bytes": 2 * INPUT},
    "recomputed": {"save": "nothing"},
    "matmuls": {"save": "matmuls"},
}


def moving(module, memory, *, every=1, min_bytes=0, save=None):
    stack = ExitStack()
    stack.kept = None if save is None else stack.enter_context(recompute([*module], save=save))
    stack.enter_context(offload_activations([*module][::every], memory=memory, min_bytes=min_bytes, device=CPU))
    return stack


def measured(**setting):
    """Return the most that a second step takes, and the memory of the host."""
    module, x = model(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ledger = Ledger()
    memory = Apart(ledger)
    ledger.claim((x, *module.parameters()), "parameters")
    with moving(module, memory, **setting) as undo, ledger:
        for _ in range(2):
            if undo.kept is not None:
                undo.kept.copies.clear()  # as the callback does once the first step has shown what is recomputed
            ledger.forget_peaks()
            loss = module(x).sum()
            optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
    return ledger.peak.total, memory.on_host


def dry_run(**setting):
    mode, ledger = fake_mode(), Ledger()
    module, memory = FakeCopies(mode=mode).copy(model()), HostMemory(ledger)
    with mode:
        x = torch.empty(ROWS, WIDTH)
    parts = StepParts(
        module=module,
        loss=lambda: module(x).sum(),
        optimizers=lambda: [torch.optim.SGD(module.parameters(), lr=0.1)],
        opened=lambda: mode,
        blocks={str(i): block for i, block in enumerate(module)},
        batch=x,
    )
    with moving(module, memory, **setting):
        step = measure(parts, ledger=ledger)
    return step, memory.used


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_planned_offloading_matches_measured_offloading(setting):
    peak, used = measured(**setting)
    step, host = dry_run(**setting)
    assert step.peak.total == pytest.approx(peak, rel=0.01)
    assert host == used > 0


def test_activations_keep_their_owner_when_they_return():
    step, _ = dry_run()
    here = step.loose["backward", "2"].by_owner("activations")
    assert here["1"] == 4 * INPUT + INPUT  # what this block was given as well
    assert here["0"] == INPUT  # what the block before was given
    assert "3" not in here
