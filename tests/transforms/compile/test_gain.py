import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.gain import MOST_CALLS, MOST_ELEMENTS, ROUNDS, Gain, gain_of, is_small
from tests import backends
from tests.clocks import HostClock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def own_backends():
    backends.register()
    torch.compiler.reset()
    backends.forget()


class Net(nn.Module):
    """Draws from all generators, keeps statistics and attributes, writes to its input, and breaks into two graphs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout, self.calls, self.kept = nn.Dropout(0.3), 0, []

    def forward(self, x, *, scale):
        x.mul_(scale)
        hidden = self.dropout(self.norm(self.first(x)))
        hidden = self.outside_of_graphs(hidden)
        return {"out": self.second(hidden), "hidden": hidden}

    @torch.compiler.disable(recursive=False)
    def outside_of_graphs(self, hidden):
        random.random()
        np.random.random()
        self.calls += 1
        self.kept.append(self.calls)
        return hidden.tanh()  # which saves its result


def plain(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


def gain(module, x, *, backend="aot_eager", **kwargs):
    compiled = torch.compile(plain, backend=backend)
    compiled(module, x.clone(), **kwargs)
    return gain_of(module, compiled, plain, (x,), kwargs, clock=HostClock())


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_what_is_faster_uncompiled_is_a_loss_and_what_is_faster_compiled_is_none():
    x = torch.randn(3, 4)
    slow = gain(Net(), x, backend="ups_slow", scale=2.0)
    assert slow.compiled_ms > 2 * backends.SLOW_MS  # two graphs
    assert slow.is_loss
    assert str(slow).endswith(f"take {slow.compiled_ms:.3g} ms compiled and {slow.eager_ms:.3g} ms uncompiled")

    class Waiting(nn.Linear):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                time.sleep(0.01)
            return super().forward(x)

    fast = gain(Waiting(4, 4), x)
    assert fast.eager_ms > 10
    assert not fast.is_loss


def test_a_difference_within_the_noise_is_no_loss():
    assert not Gain(compiled_ms=1.019, eager_ms=1.0).is_loss
    assert Gain(compiled_ms=1.021, eager_ms=1.0).is_loss


def test_measuring_leaves_everything_as_it_is():
    module, x = Net(), torch.randn(3, 4)
    module.second.weight.grad = torch.ones(2, 8)
    module.first.weight.register_hook(lambda _: pytest.fail("a hook of a parameter ran"))
    compiled = torch.compile(plain, backend="aot_eager")
    compiled(module, x.clone(), scale=2.0)
    state, drawn, given = copy.deepcopy(module.state_dict()), generators(), x.clone()
    kept, calls = [*module.kept], module.calls
    measured = gain_of(module, compiled, plain, (x,), {"scale": 2.0}, clock=HostClock())
    assert measured is not None
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert generators() == drawn
    assert torch.equal(x, given)
    assert (module.kept, module.calls) == (kept, calls)
    assert torch.equal(module.second.weight.grad, torch.ones(2, 8))
    assert module.first.weight.grad is None


def test_what_the_call_needs_is_compiled_once():
    compiled = torch.compile(plain, backend="aot_eager", dynamic=False)
    module, x = nn.Linear(4, 4), torch.randn(5, 4)
    compiled(module, torch.randn(3, 4))
    assert gain_of(module, compiled, plain, (x,), {}, clock=HostClock()) is not None
    start = dynamo.mark()
    compiled(module, x)
    assert not dynamo.compiled_since(start)


def test_what_is_compiled_in_each_call_is_unknown():
    sizes = iter(range(3, 100))

    def eager(module, x):
        compiled(module, torch.randn(next(sizes), 4))
        return plain(module, x)

    compiled = torch.compile(plain, backend="aot_eager", dynamic=False)
    assert gain_of(nn.Linear(4, 4), compiled, eager, (torch.randn(2, 4),), {}, clock=HostClock()) is None


class Failing(nn.Linear):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            raise torch.OutOfMemoryError("uncompiled it needs more")
        return super().forward(x)


class Watched(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4))
        self[0].register_forward_hook(lambda *_: self.seen.append(1))
        self.seen = []


@pytest.mark.parametrize("module", [Failing(4, 4), Watched()], ids=lambda m: type(m).__name__)
def test_what_cannot_be_measured_is_unknown(module):
    x, drawn = torch.randn(3, 4), generators()
    compiled = torch.compile(plain, backend="aot_eager")
    compiled(module, x)
    seen = len(getattr(module, "seen", ()))
    assert gain_of(module, compiled, plain, (x,), {}, clock=HostClock()) is None
    assert generators() == drawn
    assert len(getattr(module, "seen", ())) == seen


def test_a_forward_without_gradients_is_measured_alone():
    class Constant(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    assert gain(Constant(4, 4), torch.randn(3, 4), backend="ups_slow").is_loss


class Pair(nn.Linear):
    def forward(self, left, right):
        if left is right:
            return super().forward(left)
        return super().forward(left + right)


def test_inputs_that_are_one_tensor_stay_one_and_gradients_reach_them():
    module, x, asked = Pair(4, 4), torch.randn(3, 4, requires_grad=True), []
    x = x * 2

    def eager(module, left, right):
        asked.append((left is right, left.requires_grad, left is x))
        return plain(module, left, right)

    compiled = torch.compile(plain, backend="aot_eager")
    compiled(module, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(module, x, x)
        assert gain_of(module, compiled, eager, (x, x), {}, clock=HostClock()) is not None
    assert asked == [(True, True, False)] * (ROUNDS + 1)


def test_what_takes_long_is_measured_less_often():
    clock, calls = HostClock(), []

    def slow(module, x):
        calls.append(1)
        clock.ahead += 2500.0
        return plain(module, x)

    measured = gain_of(nn.Linear(4, 4), plain, slow, (torch.randn(3, 4),), {}, clock=clock)
    assert len(calls) == 2
    assert measured.eager_ms == pytest.approx(2500, abs=200)


def captured(model, *inputs, dynamic=None):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


def chain(length):
    def run(x):
        for _ in range(length):
            x = x.sin()
        return x

    return run


@pytest.mark.parametrize(("length", "small"), [(3, True), (MOST_CALLS, True), (MOST_CALLS + 1, False)])
def test_few_operators_are_small(length, small):
    assert is_small(captured(chain(length), torch.ones(4))) is small


@pytest.mark.parametrize(("elements", "small"), [(MOST_ELEMENTS // 2, True), (MOST_ELEMENTS // 2 + 1, False)])
def test_large_tensors_are_not(elements, small):
    assert is_small(captured(chain(2), torch.ones(elements))) is small


def test_several_results_of_an_operator_count():
    assert not is_small(captured(lambda x: x.max(1).values + x.split(1, 1)[0][:, 0], torch.ones(MOST_ELEMENTS, 1)))


def test_sizes_that_vary_are_not_small():
    assert not is_small(captured(chain(1), torch.ones(5, 4), dynamic=True))
