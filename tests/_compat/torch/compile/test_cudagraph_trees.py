import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo_utils  # noqa: TID251
from torch._inductor import compile_fx, config, cpu_vec_isa, cudagraph_utils  # noqa: TID251
from torch._inductor.graph import GraphLowering  # noqa: TID251
from torch._inductor.utils import fresh_cache  # noqa: TID251

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups._compat.torch.compile.cudagraph_trees import Demand, marked_steps, recorded_on_demand, recordings

CUDA = torch.device("cuda", 0)


def node(**children):
    return SimpleNamespace(children={name: [*nodes] for name, nodes in children.items()})


def trees(manager):
    return SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager if index == 0 else None)


@pytest.mark.parametrize(
    ("manager", "count"),
    [
        (None, 0),
        (SimpleNamespace(roots=None), 0),  # shut down
        (SimpleNamespace(roots={}), 0),
        (SimpleNamespace(roots={"f": [node(b=[node()]), node(b=[node(), node(f=[node()])])], "g": [node()]}), 7),
    ],
    ids=["none", "shut down", "empty", "trees"],
)
def test_all_nodes_of_all_trees_are_counted(monkeypatch, manager, count):
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees(manager))
    assert recordings(CUDA) == count
    assert recordings(torch.device("cuda", 1)) == 0
    assert recordings(torch.device("cpu")) == 0


def test_where_nothing_was_recorded_nothing_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert recordings(CUDA) == 0
    assert "torch._inductor.cudagraph_trees" not in sys.modules


def test_where_nothing_was_marked_nothing_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    with marked_steps():
        pass
    assert "torch._inductor.cudagraph_trees" not in sys.modules


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


def test_marks_of_others_go_on(box):
    box.mark_step_counter = -3
    with marked_steps():
        box.mark_step_counter -= 1
    assert box.mark_step_counter == -4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_recordings_of_a_gpu_are_counted():
    torch.compiler.reset()  # recordings of earlier tests could go at any moment
    device = torch.device("cuda", torch.cuda.current_device())
    before = recordings(device)
    linear = torch.nn.Linear(8, 8, device=device)
    run = torch.compile(linear, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.autograd.grad(run(torch.ones(2, 8, device=device)).sum(), [*linear.parameters()])
    assert recordings(device) == before + 2  # a forward and a backward


class Recorder:
    """Stands for inductor's CUDA graphs, on a CPU: counts the calls that are replayed."""

    def __init__(self):
        self.replayed = []

    def cudagraphify(self, model, static_input_idxs=(), **options):
        def run(inputs):
            self.replayed.append("backward" if options["is_backward"] else "forward")
            return model(inputs)

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
    wanted, x = [], torch.randn(3, 4)
    module = nn.Linear(4, 2, bias=False)  # which takes no kernels that a compiler of C++ makes
    if cached:
        compiled_on_demand(module, Demand(lambda: False))(x)
    demand, expected = Demand(lambda: bool(wanted)), module(x)
    run = compiled_on_demand(module, demand)
    launched = run(x)
    hits, _ = counted = dynamo.cache_hits()
    assert cached == (hits > 0)
    wanted.append(1)
    replayed = run(x)
    wanted.clear()
    assert recorder.replayed == ["forward"]
    launched.sum().backward()
    assert recorder.replayed == ["forward"]
    demand.begin_backward()
    replayed.sum().backward()
    assert recorder.replayed == ["forward", "backward"]
    run(x).sum().backward()
    assert recorder.replayed == ["forward", "backward"]
    torch.testing.assert_close([launched, replayed], [expected, expected])
    assert dynamo.cache_hits() == counted
    assert compile_fx.cudagraphify == recorder.cudagraphify


def test_a_forward_without_a_backward_that_can_be_replayed_is_launched(recorder):
    demand, module = Demand(lambda: True), nn.Linear(4, 4)
    run = compiled_on_demand(module, demand)
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(2, 4)), module(torch.ones(2, 4)))
    assert recorder.replayed == []


def test_inputs_that_are_not_aligned_are_copied_as_without_cuda_graphs(recorder):
    seen = []

    def model(inputs):
        seen.extend(value.data_ptr() % 16 for value in inputs if isinstance(value, torch.Tensor))
        inputs[1].add_(1)

    with recorded_on_demand(Demand(lambda: False)):
        run = compile_fx.cudagraphify(model, (0,), is_backward=False, mutated_input_idxs=(1,))
    static, given, memory = torch.zeros(9)[1:], torch.zeros(9)[1:], torch.zeros(8)
    run([static, given, memory, 3])
    assert seen == [static.data_ptr() % 16, 0, 0]
    assert seen[0] != 0
    assert given.tolist() == [1.0] * 8
