from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_ups.transforms.step_graph import difference, layout_of

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "one other")


@dataclass
class Data:
    x: torch.Tensor
    name: str = "a"


def layout(batch):
    tensors = []
    return layout_of(batch, tensors, device=CPU), tensors


X, Y = torch.zeros(2, 3), torch.zeros(4)


@pytest.mark.parametrize(
    "batch", [X, (X, Y), [X, {"y": Y}], Pair(X, Y), Data(X), OrderedDict(x=X, n=3), {"x": X, "none": None, "s": "a"}]
)
def test_batches_of_one_layout_are_equal(batch):
    one, tensors = layout(batch)
    assert one == layout(batch)[0]
    assert hash(one) == hash(layout(batch)[0])
    assert tensors[0] is X


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, Y),
        (X, X.double()),
        ((X, Y), [X, Y]),
        ({"x": X}, {"y": X}),
        ({"n": 1}, {"n": 2}),
        ({"n": 1}, {"n": True}),
        (Data(X), Data(X, "b")),
    ],
)
def test_others_differ(one, other):
    assert layout(one)[0] != layout(other)[0]


@pytest.mark.parametrize(
    "batch", [X.to("meta"), X.to_sparse(), X.clone().requires_grad_(), object(), [torch.Generator()]]
)
def test_what_a_graph_cannot_read_is_refused(batch):
    with pytest.raises(TypeError):
        layout(batch)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"x": X}, {"x": X[:1]}, "[2, 3] and [1, 3]"),
        ((X, Y), (X, Y.double()), "torch.float32 and torch.float64"),
        ({"x": X, "n": "a"}, {"x": X, "n": "b"}, "'a' and 'b'"),
    ],
)
def test_the_first_difference_is_named(one, other, said):
    assert difference(layout(one)[0], layout(other)[0]) == said
