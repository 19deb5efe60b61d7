"""What is moved to the host in a rehearsal, against a step on the CPU whose live memory is followed."""

import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups._compat.torch.tensors.autograd import outside_modes
from lightning_ups.insight.dry_run import FakeCopies
from lightning_ups.insight.memory.account import Ledger, allocated
from lightning_ups.insight.memory.offloaded import HostMemory
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


class Live(TorchDispatchMode):
    """Follows the memory of the tensors that are made, apart from that of the host."""

    def __init__(self):
        super().__init__()
        self.total = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return result

    def note(self, tensor, size=None):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = allocated(storage.nbytes()) if size is None else size
            self.total += self.sizes[storage._cdata]
            self.peak = max(self.peak, self.total)
            weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key):
        self.total -= self.sizes.pop(key)


class Apart(LateMemory):
    """A host whose memory is none of the device's."""

    def __init__(self, live):
        super().__init__()
        self.live = live

    def host(self, nbytes):
        with outside_modes():
            memory = super().host(nbytes)
        self.live.note(memory, size=0)
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
    live = Live()
    memory = Apart(live)
    for tensor in (x, *module.parameters()):
        live.note(tensor)
    with moving(module, memory, **setting) as undo, live:
        for _ in range(2):
            if undo.kept is not None:
                undo.kept.copies.clear()  # as the callback does once the first step has shown what is recomputed
            live.peak = live.total
            loss = module(x).sum()
            optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
    return live.peak, memory.on_host


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
def test_as_much_as_was_measured(setting):
    peak, used = measured(**setting)
    step, host = dry_run(**setting)
    assert step.peak.total == pytest.approx(peak, rel=0.01)
    assert host == used > 0


def test_whose_what_comes_back_is():
    step, _ = dry_run()
    here = step.loose["backward", "2"].by_owner("activations")
    assert here["1"] == 4 * INPUT + INPUT  # what this block was given as well
    assert here["0"] == INPUT  # what the block before was given
    assert "3" not in here
