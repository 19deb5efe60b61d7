import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.compile import dynamo
from lightning_ups.transforms.compile.frame import Compiler, frame_of
from lightning_ups.transforms.compile.group import Group, worth_telling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EAGER = Compiler(backend="eager", dynamic=False)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


def frames(width):
    make = {"name": "a", "alone": False}
    return [frame_of(Scale.forward, Scale(width), EAGER, phase=p, **make) for p in ("training", "evaluation")]


def call(frame, width, *sizes):
    for size in sizes:
        start = dynamo.mark()
        frame.run(Scale(width), torch.ones(size, width))
        if dynamo.compiled_since(start):
            frame.graphs += 1  # as a backend counts
            frame.learn(start, asker="a", kind=None)


def test_facts_are_those_of_this_run_and_of_each_frame_once():
    training, evaluation = frames(31)
    call(training, 31, 2, 3)
    group = Group("Scale", training)
    for name in ("a", "b", "c"):
        group.add(name, evaluation)
    call(training, 31, 4)
    call(evaluation, 31, 2)
    assert (group.blocks, group.frames) == (["a", "b", "c"], [training, evaluation])
    facts = group.facts
    assert (facts["graphs"], facts["new_graphs"]) == (4, 2)
    assert sum(facts["recompiles"].values()) == 1
    assert group.summary.startswith("a and 2 equal blocks (Scale): 4 graphs, 0 graph breaks, 1 recompile, ")


def test_a_block_may_be_evaluated_in_a_frame_of_its_own():
    training, evaluation = frames(32)
    alone = frame_of(Scale.forward, Scale(32), EAGER, name="b", alone=True, phase="evaluation")
    group = Group("Scale", training)
    for name in ("a", "b"):
        group.add(name, evaluation)
    group.add("b", alone)
    assert (group.blocks, group.frames) == (["a", "b"], [training, evaluation, alone])


def told(frame, recompiles, *, max_recompiles=3, compiler=EAGER):
    return dict(worth_telling("It", frame, recompiles, max_recompiles=max_recompiles, compiler=compiler))


def test_churn_is_told_from_its_first_signs_to_its_end():
    frame, _ = frames(33)
    call(frame, 33, *range(2, 6))
    assert told(frame, frame.recompiles) == {}
    assert "It was compiled 3 times more than once" in told(frame, frame.recompiles, max_recompiles=2)["recompiles"]
    call(frame, 33, *range(6, 2 + dynamo.recompile_limit()))
    assert "as many as Dynamo allows" in told(frame, frame.recompiles)["last"]
    call(frame, 33, 100)
    assert "gets no more" in told(frame, frame.recompiles)["full"]


def test_a_part_without_cuda_graphs_is_told_if_they_were_asked_for():
    frame, _ = frames(34)
    frame.no_cuda_graphs.append("mutated inputs")
    assert told(frame, []) == {}
    assert "It: mutated inputs" in told(frame, [], compiler=Compiler(backend="cudagraphs"))["cuda graphs"]
