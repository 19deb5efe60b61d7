from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.compiler import compiled
from lightning_ups.transforms.compile.cuda_graphs import OwnGradients
from lightning_ups.transforms.compile.frame import Compiler
from lightning_ups.transforms.compile.mode import PACED_STEPS
from lightning_ups.transforms.compile.replay import MOST_RECORDINGS, Replay, call_of
from tests import backends
from tests.clocks import FixedClock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def own_backends():
    backends.register()
    torch.compiler.reset()
    backends.forget()


def test_calls_are_told_apart_by_sizes_types_values_and_mode():
    x, module = torch.ones(2, 3), nn.Identity()

    def call(*args, **kwargs):
        return call_of("net", module, args, kwargs)

    same = call(x, {"mask": None, "ids": [x, x]}, scale=2.0)
    assert same == call(x * 2, {"mask": None, "ids": [x, x + 1]}, scale=2.0)
    others = [
        call(x[:1], {"mask": None, "ids": [x, x]}, scale=2.0),
        call(x.t().contiguous().t(), {"mask": None, "ids": [x, x]}, scale=2.0),
        call(x.double(), {"mask": None, "ids": [x, x]}, scale=2.0),
        call(x.clone().requires_grad_(), {"mask": None, "ids": [x, x]}, scale=2.0),
        call(x, {"mask": x, "ids": [x, x]}, scale=2.0),
        call(x, {"mask": None, "ids": (x, x)}, scale=2.0),
        call(x, {"mask": None, "ids": [x]}, scale=2.0),
        call(x, {"mask": None, "ids": [x, x]}, scale=3.0),
        call(x, {"mask": None, "ids": [x, x]}, factor=2.0),
        call_of("other", module, (x, {"mask": None, "ids": [x, x]}), {"scale": 2.0}),
        call_of("net", nn.Identity().eval(), (x, {"mask": None, "ids": [x, x]}), {"scale": 2.0}),
    ]
    assert same not in others
    assert len({same, *others}) == len(others) + 1


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "a"


class Graph:
    pass


def test_a_call_knows_what_it_does_not_know():
    x, module = torch.ones(2, 3), nn.Identity()
    assert call_of("net", module, (Batch(x),), {}).unknown is None
    assert call_of("net", module, (Batch(x),), {}) == call_of("net", module, (Batch(x + 1),), {})
    assert call_of("net", module, (Batch(x),), {}) != call_of("net", module, (Batch(x[:1]),), {})
    assert call_of("net", module, (Batch(x),), {}) != call_of("net", module, (Batch(x, "b"),), {})
    assert call_of("net", module, ([x, Graph()],), {}).unknown == "Graph"


class Loop:
    """A training loop by hand around a model that may be replayed."""

    def __init__(self, model, clock, *, recordings=backends.recordings):
        self.model, self.told = model, []
        compiler = Compiler(backend="ups_modes", mode="reduce-overhead", on_demand=True)
        self.replay = Replay(clock, recordings=recordings, tell=self.told.append)
        self.gradients = OwnGradients(model)
        self.context = compiled({"": model}, compiler, replay=self.replay, trial=True)

    def step(self, x, *, backward=True):
        self.replay.begin_step()
        output = self.model(x)
        if backward:
            output.square().sum().backward()
            if self.replay.gradients:
                self.gradients.take()
        self.replay.decide()
        self.replay.check()
        return output


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_it_replays_after_the_first_step_and_adds_to_gradients():
    model, expected, x = net(), net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        outputs = [loop.step(x) for _ in range(4)]
    for _ in range(4):
        expected(x).square().sum().backward()
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert loop.replay.facts["mode"] == "reduce-overhead"
    assert len(backends.RECORDED) == 2 * (3 + 3)


def test_it_is_recorded_for_the_place_of_buffers_and_leaves_their_values(monkeypatch):
    class Watched(backends._Recorded):
        def __call__(self, *args):
            read.append({arg.data_ptr() for arg in args})
            return super().__call__(*args)

    monkeypatch.setattr(backends, "_Recorded", Watched)
    torch.manual_seed(0)
    model, read, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), [], torch.randn(3, 4)
    expected = deepcopy(model)
    places = {buffer.data_ptr() for buffer in model.buffers()}
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        for _ in range(3):
            loop.step(x)
    for _ in range(3):
        expected(x)
    assert loop.replay.active
    forwards = read[::2]
    assert len(forwards) == 3 + 2  # a rehearsal, and two steps
    assert all(places <= arguments for arguments in forwards)
    for buffer, reference in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, reference)


def test_one_forward_waits_for_its_backward_and_others_run_beside_it():
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        loop.step(x)
        loop.step(x)
        loop.replay.begin_step()
        first, ran = model(x), len(backends.RECORDED)
        second = model(x * 2)  # with the first still to be used in a backward
        assert len(backends.RECORDED) == ran
        (first.sum() + second.sum()).backward()
        model(x)
        assert len(backends.RECORDED) == ran + 2  # the backward of the first, and a forward


def test_evaluation_and_gradients_in_another_mode_are_not_replayed():
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        loop.step(x)
        loop.step(x)
        loop.replay.begin_step()
        ran = len(backends.RECORDED)
        with torch.no_grad():
            kept = [model(x * factor) for factor in (1, 2)]
        assert not torch.equal(*kept)
        model.eval()
        model(x)
        assert len(backends.RECORDED) == ran
        model.train()
        model(x)
        assert len(backends.RECORDED) == ran + 1


def test_nothing_is_decided_before_something_ran_and_nothing_twice():
    replay = Replay(FixedClock(2.0, 1.0), recordings=lambda: 0, tell=print)
    replay.begin_step()
    replay.decide()
    assert (replay.choice, replay.active, replay.idle, replay.facts) == (None, False, False, {})
    loop = Loop(net(), FixedClock(0.2, 2.0))
    with loop.context:
        loop.step(torch.randn(3, 4))
        choice = loop.replay.choice
        assert (loop.replay.active, loop.replay.idle) == (False, True)
        loop.step(torch.randn(3, 4))
        assert loop.replay.choice is choice


@pytest.mark.parametrize(("between", "graphs"), [(5.0, True), (0.0, False)])
def test_a_choice_between_waits_for_some_steps(between, graphs):
    clock = FixedClock(1.0, 2.0)
    loop = Loop(net(), clock)
    with loop.context:
        for step in range(PACED_STEPS + 2):
            assert loop.replay.choice is None, step
            loop.step(torch.randn(3, 4))
            clock.time += between  # of the host, outside the model
        assert loop.replay.active is graphs
        assert loop.replay.facts["step_ms"] == pytest.approx(between + 0.5, abs=0.5)


def test_what_could_not_be_tried_is_not_replayed():
    model = net()
    loop = Loop(model, FixedClock(2.0, 1.0))
    loop.replay.time = lambda rehearsal: loop.replay.untimed("it ran out of memory")
    with loop.context:
        loop.step(torch.randn(3, 4))
    assert str(loop.replay.choice) == "mode auto: default, since the model could not be measured: it ran out of memory"


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, graph):
        return self.net(graph.x)


def test_an_input_without_known_sizes_forbids_graphs():
    graph = Graph()
    graph.x = torch.randn(3, 4)
    loop = Loop(Takes(), FixedClock(2.0, 1.0))
    with loop.context:
        loop.step(graph)
    assert "called with a Graph, which does not say what sizes it has" in str(loop.replay.choice)


def test_what_others_have_recorded_is_no_recording_of_this_model():
    loop = Loop(net(), FixedClock(2.0, 1.0), recordings=lambda: 7)
    with loop.context:
        for _ in range(2):
            loop.step(torch.randn(3, 4))
    assert loop.replay.idle
    assert "inductor records none: nothing of the model can be recorded" in str(loop.replay.choice)


def test_a_recording_of_an_earlier_run_is_used_again_and_was_not_made_in_this_one():
    model, facts = net(), []
    for _ in range(2):
        loop = Loop(model, FixedClock(2.0, 1.0))
        with loop.context:
            for _ in range(3):
                loop.step(torch.randn(3, 4))
        facts.append(loop.replay.facts)
    assert [found["mode"] for found in facts] == ["reduce-overhead"] * 2
    assert [found["recorded"] for found in facts] == [2, 0]


def test_recordings_beyond_a_few_end_it_in_the_middle_of_a_run():
    more = [0]
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0), recordings=lambda: backends.recordings() + more[0])
    with loop.context:
        loop.step(x)
        loop.step(x)
        more[0] += MOST_RECORDINGS
        loop.step(x)
        assert loop.replay.active
        more[0] += 1
        loop.step(x)
        assert loop.replay.idle
        assert loop.replay.gradients  # of this step
        ran = len(backends.RECORDED)
        loop.step(x)
        assert not loop.replay.gradients
        assert len(backends.RECORDED) == ran
    (told,) = loop.told
    assert told.endswith("Set mode='default' to do without from the start.")


def test_the_recording_is_of_what_is_compiled_and_other_sizes_leave_it_alone():
    model, x, other = net(), torch.randn(3, 4), torch.randn(5, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context as run:
        loop.step(x)
        start = dynamo.mark()
        loop.step(x)
        assert backends.RECORDED
        assert not dynamo.compiled_since(start)
        ran = len(backends.RECORDED)
        for size in (other, other[:4], other[:2]):  # the second size makes a graph for any
            torch.testing.assert_close(loop.step(size), model[2](model[1](model[0](size))))
        assert len(backends.RECORDED) == ran
        assert run.groups[0].frame.num_compiled == 1
        start = dynamo.mark()
        loop.step(x)
        assert len(backends.RECORDED) == ran + 2
        assert not dynamo.compiled_since(start)
        assert run.facts["graphs"] == 3  # the recorded one, that of five rows, and that of any number


def test_another_graph_than_the_recorded_one_is_not_replayed():
    replay = Replay(FixedClock(2.0, 1.0), recordings=lambda: 0, tell=print)
    first, second = object(), object()
    assert replay.records_graph(second)
    assert replay.records_graph(first)  # the last before it is proved to work
    replay._tried = True
    assert replay.records_graph(first)
    assert not replay.records_graph(second)
