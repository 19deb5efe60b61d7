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


@pytest.mark.parametrize("before", [0, -3])
def test_marks_are_taken_back(monkeypatch, before):
    box = SimpleNamespace(mark_step_counter=before)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(MarkStepBox=box))

    @marked_steps()
    def run():
        box.mark_step_counter -= 7
        raise KeyError

    with pytest.raises(KeyError):
        run()
    assert box.mark_step_counter == before


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
