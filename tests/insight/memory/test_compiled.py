import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fake_tensors import fake_mode
from lightning_ups.insight.dry_run import FakeCopies
from lightning_ups.insight.memory.account import Ledger
from lightning_ups.insight.memory.compiled import Program, as_compiled
from lightning_ups.transforms.recompute.wrapping import recompute

KB = 1024
LEFT = []  # what was alive when a backward had ended


class Block(nn.Module):
    """Keeps much when it is eager: every step of a chain of pointwise operators has something to keep."""

    def __init__(self, width=16):
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        hidden = self.a(x)
        return x + self.b(torch.tanh(torch.sigmoid(hidden.exp()) * hidden.sin()))


def saved(*, compiled, save=None, depth=2):
    """Return the bytes that ``depth`` blocks keep, for an input of 64 KB."""
    mode, ledger = fake_mode(), Ledger()
    module = FakeCopies(mode=mode).copy(nn.Sequential(*(Block() for _ in range(depth))))
    with mode, ledger:
        x = torch.empty(1024, 16, requires_grad=True)
        ledger.claim(module.parameters(), "parameters")
        ledger.claim([x], "batch")
        ledger.start("forward")
        if save:
            with recompute(module, save=save):
                return _saved(module, x, ledger, compiled=compiled)
        return _saved(module, x, ledger, compiled=compiled)


def _saved(module, x, ledger, *, compiled):
    if not compiled:
        return _kept(module(x), ledger)
    with as_compiled(module, ledger=ledger):
        return _kept(module(x), ledger)


def _kept(y, ledger):
    kept = ledger.now().of("activations")
    ledger.start("backward")
    y.sum().backward()
    del y
    LEFT.append(ledger.now().of("activations"))
    return kept


def test_a_compiled_block_saves_inputs_of_matrix_products():
    # The product before the chain, and what enters the product after it; the input is the block's before. The last
    # result is alive.
    assert saved(compiled=True) == 2 * (64 + 64 + 64) * KB
    assert saved(compiled=False) == 2 * 6 * 64 * KB


def left():
    saved(compiled=True)
    saved(compiled=False)
    return LEFT


def test_no_tensor_stays_alive(fresh_process):
    """Where a compilation has failed before, Dynamo holds on to one of the next one's tensors."""
    assert fresh_process(left) == [0, 0]


def test_recomputed_and_compiled():
    assert saved(compiled=True, save="nothing") == 2 * 64 * KB  # the inputs of blocks: results of others
    assert saved(compiled=True, save="matmuls") == 2 * (64 + 64) * KB


@pytest.mark.parametrize("reduces", [False, True])
def test_gradients_that_the_graph_reduces_are_claimed_as_they_are_made(reduces):
    mode, ledger = fake_mode(), Ledger()
    module = FakeCopies(mode=mode).copy(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))))
    with mode, ledger:
        x = torch.empty(8, 128)  # 4 KB, beside weights of 64 KB
        ledger.claim([x], "batch")
        for i, layer in enumerate(module):
            ledger.claim([layer.weight], "parameters", str(i))
        with as_compiled([module], ledger=ledger, reduces=reduces):
            ledger.start("forward")
            y = module(x)
            ledger.start("backward")
            y.sum().backward()
    most = ledger.loose["backward", ""]
    loose, claimed = most.of("activations", "temporaries"), most.by_owner("gradients")
    if reduces:
        assert 64 * KB < loose < 2 * 64 * KB  # one is being made
        assert set(claimed.values()) <= {64 * KB}
        assert set(claimed) <= set("0123")
    else:
        assert loose > 4 * 64 * KB
        assert not claimed


def test_fused_results_take_no_memory():
    mode, ledger = fake_mode(), Ledger()
    module = FakeCopies(mode=mode).copy(Block())
    with mode, ledger, torch.no_grad():
        x = torch.empty(1024, 16)
        ledger.claim([*module.parameters(), x], "parameters")
        with as_compiled([module], ledger=ledger):
            ledger.start("forward")
            y = module(x)
    # A product, what enters the next, and that: the second is written over the first.
    assert ledger.peaks["forward"].of("activations") == 2 * 64 * KB
    assert y.shape == (1024, 16)


def test_equal_blocks_share_their_graphs(monkeypatch):
    made = []
    monkeypatch.setattr(
        "lightning_ups.insight.memory.compiled.Program",
        lambda graph, ledger: made.append(1) or Program(graph, ledger),
    )
    saved(compiled=True, depth=4)
    assert len(made) == 2  # forward and backward


def test_forwards_are_put_back_and_the_size_may_change():
    module = nn.Sequential(Block(), Block())
    mode, ledger = fake_mode(), Ledger()
    other = FakeCopies(mode=mode).copy(module)
    for samples in (3, 7):
        with mode, ledger, as_compiled(other, ledger=ledger):
            assert other(torch.empty(samples, 16)).shape == (samples, 16)
    assert "forward" not in vars(other[0])


def test_a_graph_with_a_sort_keeps_what_is_sorted():
    graph = torch.fx.symbolic_trace(_Sorted())
    for node in graph.graph.nodes:
        assert node.op != "call_module"
    ledger = Ledger()
    program = Program(graph, ledger)
    names = {node.name for node in program.stored}
    assert {"sort_default", "mul_tensor"} <= names
    assert "add_tensor" not in names
    with fake_mode():
        assert program([torch.empty(4)])[0].shape == (4,)


class _Sorted(nn.Module):
    def forward(self, x):
        added = torch.ops.aten.add.Tensor(x, x)
        scaled = torch.ops.aten.mul.Tensor(added, x)
        return (torch.ops.aten.sort.default(scaled)[0],)


@pytest.mark.parametrize("scope", [1, 2])
def test_a_graph_break_is_no_obstacle(scope):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            x = self.inner(x)
            torch._dynamo.graph_break()  # noqa: TID251
            return x * 2

    mode, ledger = fake_mode(), Ledger()
    module = FakeCopies(mode=mode).copy(Broken())
    with mode, ledger, as_compiled([module], ledger=ledger):
        x = torch.empty(scope, 16, requires_grad=True)
        module(x).sum().backward()
    assert x.grad.shape == (scope, 16)
