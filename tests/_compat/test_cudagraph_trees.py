import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_ups._compat.cudagraph_trees import marked_steps, recordings

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
    monkeypatch.setattr("lightning_ups._compat.cudagraph_trees._LAST_MARK", 0)
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
