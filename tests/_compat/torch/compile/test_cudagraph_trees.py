import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo_utils  # noqa: TID251
from torch._inductor import compile_fx, config, cpu_vec_isa, cudagraph_utils  # noqa: TID251
from torch._inductor import cudagraph_trees as trees  # noqa: TID251
from torch._inductor.graph import GraphLowering  # noqa: TID251
from torch._inductor.utils import fresh_cache  # noqa: TID251

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import (
    Demand,
    Recording,
    marked_steps,
    recorded_on_demand,
)
from tests import backends


@pytest.fixture
def box(monkeypatch):
    box = SimpleNamespace(mark_step_counter=0)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(MarkStepBox=box))
    monkeypatch.setattr("lightning_ups._compat.torch.compile.cudagraph_trees._LAST_MARK", 0)
    return box


def test_marks_end_with_the_run_and_no_two_runs_have_the_same(box):
    seen = []

    @marked_steps()
    def run():
        for _ in range(3):
            box.mark_step_counter -= 1  # as torch marks a step
            seen.append(box.mark_step_counter)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            run()
        assert box.mark_step_counter == 0
    assert seen == [-1, -2, -3, -4, -5, -6]


class Recorder:
    """Stands for inductor's CUDA graphs, on a CPU: counts the calls that are replayed, and keeps their memory."""

    def __init__(self):
        self.replayed, self.memory = [], []

    def cudagraphify(self, model, static_input_idxs=(), **options):
        def run(inputs):
            self.replayed.append("backward" if options["is_backward"] else "forward")
            backends.runs(run)
            self.memory.append(outputs := model(inputs))
            return outputs

        return run


@pytest.fixture
def recorder(monkeypatch):
    """Let inductor take the CPU for a device with CUDA graphs."""

    def add_device_info(graph, device):
        graph.device_types.add(device.type)
        graph.device_idxs.add(0)

    recorder = Recorder()
    monkeypatch.setattr(compile_fx, "cudagraphify", recorder.cudagraphify)
    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", lambda *_: None)
    monkeypatch.setattr(GraphLowering, "add_device_info", add_device_info)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # for each of which the compiler is tried
    dynamo_utils.counters.clear()
    with config.patch(graph_partition=False), fresh_cache():
        yield recorder


def compiled_on_demand(module, demand):
    def backend(graph, inputs):
        compile_ = dynamo.backend_compiler("inductor", mode="reduce-overhead", dynamic=None)
        with dynamo.backward_compiled_with_forward(), recorded_on_demand(demand):
            return compile_(graph, inputs)

    torch.compiler.reset()
    return torch.compile(module, backend=backend)


@pytest.mark.parametrize("cached", [False, True])
def test_one_compilation_by_inductor_is_launched_and_replayed(recorder, cached):
    x, recording = torch.randn(3, 4), Recording()
    module = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))  # no kernels of C++
    if cached:
        compiled_on_demand(module, Demand())(x)
    demand, expected = Demand(), module(x)
    run = compiled_on_demand(module, demand)
    launched = run(x)
    hits, _ = counted = dynamo.cache_hits()
    assert cached == (hits > 0)
    with demand.using(recording):
        replayed = run(x)
    assert recorder.replayed == ["forward"]
    launched.sum().backward()
    assert recorder.replayed == ["forward"]
    replayed.sum().backward()
    assert recorder.replayed == ["forward", "backward"]
    run(x).sum().backward()
    assert recorder.replayed == ["forward", "backward"]
    torch.testing.assert_close([launched, replayed], [expected, expected])
    assert dynamo.cache_hits() == counted
    assert compile_fx.cudagraphify == recorder.cudagraphify


def test_each_backward_runs_in_the_recording_of_its_forward(recorder):
    x, ran = torch.randn(3, 4), []

    class Named(Recording):
        def run(self, part, make, inputs, *, device):
            ran.append(self)
            return super().run(part, make, inputs, device=device)

    module = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
    demand, first, second = Demand(), Named(), Named()
    run = compiled_on_demand(module, demand)
    outputs = []
    for recording in (first, second):
        with demand.using(recording):
            outputs.append(run(x))
    launched = run(x)
    (outputs[0] * outputs[1] * launched).sum().backward()
    assert ran[:2] == [first, second]
    assert sorted(map(id, ran[2:])) == sorted(map(id, (first, second)))
    outputs[0] = None
    demand.forget(first)
    first.close()
    with demand.using(second):
        run(x).sum().backward()
    assert ran[4:] == [second, second]


def test_what_needs_no_gradient_is_replayed_without_a_backward(recorder):
    demand, module = Demand(), nn.Linear(4, 4).requires_grad_(False)
    run = compiled_on_demand(module, demand)
    with demand.using(Recording()):
        torch.testing.assert_close(run(torch.ones(2, 4)), module(torch.ones(2, 4)))
    assert recorder.replayed == ["forward"]


def test_a_forward_whose_backward_cannot_be_replayed_is_launched(recorder):
    demand, forward = Demand(), recorder.cudagraphify(lambda inputs: [*inputs], is_backward=False)
    run = demand.on_demand(lambda *_, **__: forward, lambda inputs: [*inputs], (), {"is_backward": False})
    with demand.using(Recording()):
        run([torch.ones(2)])
    assert recorder.replayed == []


def test_addresses_of_what_torch_did_not_record_are_not_remembered(recorder):
    recording, outside = Recording(), torch.ones(2)
    recording.run(
        "forward", lambda: recorder.cudagraphify(lambda inputs: [torch.ones(2)], is_backward=False), [], device=0
    )
    recording.run("outside", lambda: lambda inputs: [outside], [], device=0)
    assert recording.holds(recorder.memory[0])
    assert not recording.holds([outside])


def test_a_backward_is_replayed_again_after_its_forward_was_recorded_anew(recorder):
    recording, memory, nodes = Recording(), torch.ones(2), iter(["warm", "recorded", "recorded", "anew", "anew"])
    known = {name: SimpleNode() for name in ("recorded", "anew")}

    def forward(inputs):
        container = trees.get_obj(trees.local, "tree_manager_containers")[0]
        container.tree_manager = SimpleNamespace(current_node=known.get(name := next(nodes), object()))
        return [memory if name != "anew" else other]

    other, held = torch.ones(2), []
    for _ in range(5):
        recording.run("forward", lambda: forward, [], device=0)
        held.append((recording.holds([memory]), recording.holds([other])))
    assert held == [(True, False)] * 4 + [(True, True)]


class SimpleNode:
    children = ()


def test_a_recording_runs_beside_torchs_own(recorder):
    containers, seen = trees.get_obj(trees.local, "tree_manager_containers"), []
    make = lambda: lambda inputs: (seen.append(containers.get(0)), torch.ones(2))  # noqa: E731
    one, other = Recording(), Recording()
    containers.pop(0, None)
    one.run("part", make, [], device=0)
    assert containers == {}
    containers[0] = of_torch = trees.TreeManagerContainer(0)
    for recording in (other, one):
        recording.run("part", make, [], device=0)
        assert containers.pop(0) is of_torch
        containers[0] = of_torch
    containers.clear()
    assert seen[0] is seen[2]
    assert len({*map(id, seen), id(of_torch)}) == 3


def test_inputs_that_are_not_aligned_are_copied_as_without_cuda_graphs(recorder):
    seen = []

    def model(inputs):
        seen.extend(value.data_ptr() % 16 for value in inputs if isinstance(value, torch.Tensor))
        inputs[1].add_(1)

    with recorded_on_demand(Demand()):
        run = compile_fx.cudagraphify(model, (0,), is_backward=False, mutated_input_idxs=(1,))
    static, given, memory = torch.zeros(9)[1:], torch.zeros(9)[1:], torch.zeros(8)
    run([static, given, memory, 3])
    assert seen == [static.data_ptr() % 16, 0, 0]
    assert seen[0] != 0
    assert given.tolist() == [1.0] * 8
