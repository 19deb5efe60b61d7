from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Recording
from lightning_ups.transforms.compile.compiler import compiled
from lightning_ups.transforms.compile.cuda_graphs import OwnGradients
from lightning_ups.transforms.compile.frame import Compiler
from lightning_ups.transforms.compile.mode import PACED_STEPS
from lightning_ups.transforms.compile.replay import MOST_GRAPHS, MOST_RECORDINGS, Replay, call_of
from tests import backends
from tests.clocks import FixedClock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def own_backends(monkeypatch):
    backends.register()
    torch.compiler.reset()
    backends.forget()
    monkeypatch.setattr(Recording, "count", property(lambda recording: len(recording.parts)))


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
    endless = [x]
    endless.append(endless)
    assert call_of("net", module, (endless,), {}).unknown == "list"
    assert call_of("net", module, (x.to_sparse_csr(),), {}).unknown == "Tensor"
    assert call_of("net", module, (torch.nested.nested_tensor([x, x[:1]]),), {}).unknown == "Tensor"


class Loop:
    """A training loop by hand around a model that may be replayed."""

    def __init__(self, model, clock, *, blocks=None):
        self.model, self.told = model, []
        compiler = Compiler(backend="ups_modes", mode="reduce-overhead", on_demand=True)
        self.replay = Replay(clock, tell=self.told.append)
        self.gradients = OwnGradients(model)
        self.context = compiled(
            blocks or {"": model}, compiler, replay=self.replay, trial=True, gradients=self.gradients
        )

    def step(self, x, *, backward=True):
        self.begin_step()
        output = self.model(x)
        if backward:
            self.backward(output.square().sum())
        self.end_step()
        return output

    def backward(self, loss):
        loss.backward()
        if self.replay.gradients:
            self.gradients.leave()

    def begin_step(self):
        self.replay.begin_step()
        self.gradients.take_left()
        self.replay.free()

    def end_step(self):
        self.replay.decide()
        self.replay.check()


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
    replay = Replay(FixedClock(2.0, 1.0), tell=print)
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
    loop.replay.time = lambda graph, rehearsal: loop.replay.untimed(graph, "it ran out of memory")
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


def test_where_nothing_is_recorded_it_is_given_up(monkeypatch):
    monkeypatch.setattr(Recording, "count", 0)
    loop = Loop(net(), FixedClock(2.0, 1.0))
    with loop.context:
        for _ in range(2):
            loop.step(torch.randn(3, 4))
    assert loop.replay.idle
    assert "inductor records none: nothing of the model can be recorded" in str(loop.replay.choice)


def test_each_run_has_recordings_of_its_own_and_frees_them():
    model, x = net(), torch.randn(3, 4)
    for _ in range(2):
        backends.forget()
        loop = Loop(model, FixedClock(2.0, 1.0))
        with loop.context:
            for _ in range(3):
                loop.step(x)
        assert loop.replay.facts["mode"] == "reduce-overhead"
        assert loop.replay.facts["recorded"] == 2
        assert backends.recordings() == 2
        slots = [slot for slots in loop.replay._slots.values() for slot in slots]
        loop.replay.end()
        assert [slot.recording.parts for slot in slots] == [{}]


def test_memory_that_somebody_uses_after_a_run_is_freed_when_another_run_ends(monkeypatch):
    kept = [True]
    monkeypatch.setattr(Recording, "is_kept", property(lambda recording: kept[0]))
    loop = Loop(net(), FixedClock(2.0, 1.0))
    with loop.context:
        for _ in range(3):
            loop.step(torch.randn(3, 4))
    (slot,) = [slot for slots in loop.replay._slots.values() for slot in slots]
    loop.replay.end()
    assert slot.recording.parts
    kept[0] = False
    Replay(FixedClock(2.0, 1.0), tell=print).end()
    assert not slot.recording.parts


def test_a_recording_that_finds_no_memory_in_a_later_step_harms_nothing(monkeypatch):
    model, x = net(), torch.randn(3, 4)
    loop, run = Loop(model, FixedClock(2.0, 1.0)), Recording.run

    def full(recording, *args, **kwargs):
        if recording not in known:
            raise torch.OutOfMemoryError("no room for another recording")
        return run(recording, *args, **kwargs)

    with loop.context:
        losses(loop, lambda loop: model(x).sum() + model(x * 0).sum(), steps=1)
        assert [*loop.replay._chosen.values()] == [2]
        for _ in range(3):  # one after another, so that one recording serves both
            losses(loop, lambda loop: model(x).sum(), steps=1)
        known = [slot.recording for slots in loop.replay._slots.values() for slot in slots]
        assert len(known) == 1
        monkeypatch.setattr(Recording, "run", full)
        for _ in range(3):
            losses(loop, lambda loop: model(x).sum() + model(x * 0).sum(), steps=1)
    assert loop.replay.idle
    assert "it ran out of memory" in str(loop.replay.choice)


def test_a_model_without_a_backward_is_recorded_beside_one_that_has_one():
    backbone, head, x = net().requires_grad_(False), nn.Linear(2, 2), torch.randn(3, 4)
    model = nn.ModuleDict({"backbone": backbone, "head": head})
    loop = Loop(model, FixedClock(2.0, 1.0), blocks={"backbone": backbone, "head": head})
    with loop.context:
        found = losses(loop, lambda loop: head(backbone(x)).square().sum())
    assert all(torch.equal(found[0][1][-1], gradients[-1]) for _, gradients in found)
    assert loop.replay.facts["recorded"] == 3


def test_recordings_beyond_a_few_end_it_in_the_middle_of_a_run(monkeypatch):
    more = [0]
    monkeypatch.setattr(Recording, "count", property(lambda recording: len(recording.parts) + more[0]))
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
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
        assert not loop.replay.is_over
        loop.step(x)
        assert loop.replay.is_over
        assert len(backends.RECORDED) == ran
    (told,) = loop.told
    assert told.endswith("Set mode='default' to do without from the start.")


def losses(loop, step, *, steps=5):
    """Return what ``step`` returns and the gradients after each step."""
    found = []
    for _ in range(steps):
        loop.begin_step()
        loss = step(loop)
        loop.backward(loss)
        loop.end_step()
        found.append((loss.item(), [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]))
        loop.model.zero_grad()
    return found


def two_views(loop):
    return (loop.model(torch.full((3, 4), 0.5)) * loop.model(torch.full((3, 4), -0.25)).tanh()).sum()


def twice_in_turn(loop):
    loop.backward(loop.model(torch.full((3, 4), 0.5)).sum())
    return loop.model(torch.full((3, 4), -0.25)).tanh().sum()


def twice_and_once_more(loop):
    loop.backward(loop.model(torch.full((3, 4), -0.5)).sum())
    return two_views(loop)


@pytest.mark.parametrize(
    ("step", "runs", "recorded", "launched"),
    [(two_views, 4, 4, 0), (twice_in_turn, 4, 2, 0), (twice_and_once_more, 6, 4, 2)],
)
def test_all_calls_of_a_step_are_replayed(step, runs, recorded, launched):
    expected, loop = net(), Loop(net(), FixedClock(2.0, 1.0))
    eager = Loop(expected, FixedClock(2.0, 1.0))
    references = losses(eager, step)  # without the context nothing is compiled
    with loop.context:
        found = losses(loop, step)
    torch.testing.assert_close(found, references)
    assert loop.replay.active
    assert loop.replay.facts["recorded"] == recorded == backends.recordings()
    assert len(backends.RECORDED) == 4 * runs - launched + 3 * recorded  # four steps, and three rounds of each trial


class Broken(nn.Module):
    """A model with a graph break, and with that two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = net(), nn.Sequential(nn.Linear(2, 4), nn.Tanh())

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()  # noqa: TID251
        return self.second(hidden)


def test_graphs_on_both_sides_of_a_break_are_replayed():
    def step(loop):
        return loop.model(torch.full((3, 4), 0.5)).sum()

    torch.manual_seed(0)
    model = Broken()
    references = losses(Loop(deepcopy(model), FixedClock(2.0, 1.0)), step)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        found = losses(loop, step)
    torch.testing.assert_close(found, references)
    assert loop.replay.active
    assert loop.replay.facts["recorded"] == 4


def test_many_graphs_in_a_step_are_too_many():
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        losses(loop, lambda loop: sum(model(x).sum() for _ in range(MOST_GRAPHS + 1)), steps=2)
    assert f"{MOST_GRAPHS + 1} graphs run in a step" in str(loop.replay.choice)


def test_after_an_unfreeze_it_is_chosen_anew_and_the_old_recording_is_freed():
    model, x = net(), torch.randn(3, 4)
    model[0].requires_grad_(False)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        for _ in range(3):
            loop.step(x)
        assert loop.replay.active
        (old,) = [slot for slots in loop.replay._slots.values() for slot in slots]
        model[0].requires_grad_(True)
        for _ in range(4):
            loop.step(x)
        assert loop.replay.active
        assert old.recording.parts == {}
        assert loop.replay.facts["recorded"] == 4
        ran = len(backends.RECORDED)
        loop.step(x)
        assert len(backends.RECORDED) == ran + 2
    assert loop.told == []


def test_a_model_that_is_compiled_again_and_again_is_not_recorded_for_ever():
    model, x = net(), torch.randn(3, 4)
    loop = Loop(model, FixedClock(2.0, 1.0))
    with loop.context:
        for frozen in range(8):
            for index, parameter in enumerate(model[0].parameters()):
                parameter.requires_grad_(bool(frozen & (1 << index)) != (frozen > 3))
            model[2].bias.requires_grad_(frozen % 3 > 0)
            for _ in range(3):
                loop.step(x)
    assert loop.replay.idle
    assert "the model was compiled again" in str(loop.replay.choice)


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
