from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from lightning_ups.kernels.attention import Documents
from lightning_ups.transforms.pipeline import split_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Sample:
    x: torch.Tensor
    name: str


X = torch.arange(8).view(4, 2)


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        (X, X[2:]),
        ((X, X[:, 0]), (X[2:], X[2:, 0])),
        ([X, torch.ones(3)], [X[2:], torch.ones(3)]),
        ({"x": X, "scale": 2.0}, {"x": X[2:], "scale": 2.0}),
        (Pair(X, X + 1), Pair(X[2:], X[2:] + 1)),
    ],
    ids=repr,
)
def test_the_second_of_two_parts(batch, part):
    second = split_batch(batch, 2)[1]
    assert type(second) is type(batch)
    torch.testing.assert_close(second, part)


def test_texts_are_split_with_the_rows():
    assert split_batch({"x": X, "texts": [*"abcd"]}, 2)[1]["texts"] == [*"cd"]


def test_a_dataclass_keeps_what_is_no_tensor():
    second = split_batch(Sample(X, "a"), 2)[1]
    assert second.name == "a"
    torch.testing.assert_close(second.x, X[2:])


def test_documents_are_those_of_the_rows():
    ids = torch.tensor([[0, 0, 1], [2, 3, 3], [4, 4, 4], [5, 5, 6]])
    second = split_batch((X, Documents.from_ids(ids)), 2)[1][1]
    right = Documents.from_ids(ids[2:])
    assert second.cu_seqlens.tolist() == right.cu_seqlens.tolist()
    assert second.ids.tolist() == right.ids.tolist()


@pytest.mark.parametrize("batch", [X, {"n": 1}], ids=repr)
def test_rows_that_do_not_divide_are_refused(batch):
    with pytest.raises(ValueError, match="microbatches=3"):
        split_batch(batch, 3)
