import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_ups.insight.throughput.units import counter

IDS = torch.zeros(4, 16, dtype=torch.long)
Pair = namedtuple("Pair", "ids mask")


@dataclass
class Batch:
    name: str
    pixels: torch.Tensor


@dataclass
class Text:
    text: dict


IMAGE = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "unit", "number"),
    [
        (IDS, "tokens", 64),
        ((IDS[:, :-1], IDS[:, 1:]), "tokens", 60),
        ({"attention_mask": IDS[:, :4], "input_ids": IDS}, "tokens", 64),
        (UserDict({"input_ids": IDS}), "tokens", 64),
        ((IMAGE, torch.zeros(4, dtype=torch.long)), "samples", 4),
        (torch.randn(4, 16), "samples", 4),
        ([torch.ones(4, 16, dtype=torch.bool)], "samples", 4),
        ({"observation.state": torch.randn(4, 16)}, "samples", 4),  # a name with a dot in it
        (Batch("a", torch.randn(4, 3, 8, 8)), "samples", 4),
        (Text({"tokens": IDS[0]}), "tokens", 16),
        (Pair(IDS, IDS), "tokens", 64),
        ((torch.randn(4, 3, 8, 8), IDS), "samples", 4),  # images and their labels
        ({"idx": torch.arange(4), "x": torch.randn(4, 8)}, "samples", 4),  # numbers of samples
        ({"idx": IDS, "x": torch.randn(4, 8)}, "tokens", 64),
        ({"input_ids": torch.arange(20), "labels": torch.arange(20)}, "tokens", 20),  # packed
        ({"input_ids": torch.arange(20), "pixels": torch.randn(2, 3, 8, 8)}, "tokens", 20),
        ({"tokens": torch.arange(4), "x": torch.randn(4, 8)}, "samples", 4),  # how many each has
        ({"tokens": torch.randn(4, 16, 8)}, "samples", 4),  # embedded
        ({"tokens": torch.tensor(64), "x": torch.randn(4, 8)}, "samples", 4),
        ({"a": torch.randn(4, 8), "b": torch.randn(3, 8)}, "samples", 4),  # of two loaders, the first
        (["text"], "batches", 1),
        (object(), "batches", 1),
    ],
)
def test_tokens_samples_or_batches_are_counted(batch, unit, number):
    name, count, _ = counter("auto", None, batch)
    assert (name, count(batch)) == (unit, number)


def test_the_counted_tensor_is_named():
    said = [
        counter("auto", None, batch)[2] for batch in ({"a": [IDS]}, (torch.randn(4, 8), 1), torch.randn(4, 8), ["text"])
    ]
    assert said == [
        "the elements of 'a.0' in the batch",
        "the rows of element 0 of the batch",
        "the rows of the batch itself",
        "since a list with no tensor has no rows",
    ]


def test_batches_may_differ():
    x, y = torch.randn(4, 8), torch.randn(3, 8)
    _, count, _ = counter("auto", None, {"a": x, "b": y})
    assert [count(batch) for batch in ({"a": x, "b": y}, {"a": None, "b": y}, {"b": y}, (x,), None)] == [4, 3, 3, 4, 0]
    _, count, _ = counter("auto", None, (x, y))
    assert [count(batch) for batch in ((), [y], {"a": x}, Batch("a", y))] == [0, 3, 4, 3]


@pytest.mark.parametrize(
    ("unit", "key", "expected"),
    [("auto", "a.0", ("tokens", 64)), ("points", "a.0", ("points", 64)), ("samples", "a.0", ("samples", 4))],
)
def test_a_tensor_may_be_named(unit, key, expected):
    batch = {"a": [IDS]}
    name, count, _ = counter(unit, key, batch)
    assert (name, count(batch)) == expected
    assert count({"a": []}) == 0  # of this batch there are none


def test_a_function_may_count():
    name, count, _ = counter("frames", lambda batch: len(batch), [1, 2, 3])
    assert (name, count([1, 2])) == ("frames", 2)


def test_a_batch_without_such_a_tensor_is_an_error():
    with pytest.raises(ValueError, match="count=a function of the batch"):
        counter("tokens", None, IMAGE)
    with pytest.raises(ValueError, match="no tensor"):
        counter("samples", None, ["text"])


def test_an_unknown_name_lists_the_tensors():
    with pytest.raises(ValueError, match=r"input_ids \[4, 16\].*Use one of these names"):
        counter("auto", "inputs", {"input_ids": IDS})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_count_as_samples(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
        unit, count, _ = counter("auto", None, {"x": nested})
        assert (unit, count({"x": nested})) == ("samples", 2)
