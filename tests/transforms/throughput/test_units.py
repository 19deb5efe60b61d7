from collections import UserDict

import pytest
import torch

from lightning_ups.transforms.throughput.units import counter

IDS = torch.zeros(4, 16, dtype=torch.long)
IMAGE = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "unit", "number"),
    [
        (IDS, "tokens", 64),
        (IDS.to(torch.uint8), "tokens", 64),
        ((IDS[:, :-1], IDS[:, 1:]), "tokens", 60),
        ({"attention_mask": IDS[:, :4], "input_ids": IDS}, "tokens", 64),
        (UserDict({"input_ids": IDS}), "tokens", 64),
        ({"text": {"tokens": IDS}}, "tokens", 64),
        ((IMAGE, torch.zeros(4, dtype=torch.long)), "samples", 4),
        (torch.randn(4, 16), "samples", 4),
        ([torch.ones(4, 16, dtype=torch.bool)], "samples", 4),
    ],
)
def test_what_there_is_is_found(batch, unit, number):
    name, count = counter("auto", None, batch)
    assert (name, count(batch)) == (unit, number)


def test_samples_may_be_counted_where_there_are_tokens():
    assert counter("samples", None, IDS)[1](IDS) == 4


def test_a_later_batch_may_be_smaller():
    _, count = counter("auto", None, {"input_ids": IDS})
    assert count({"input_ids": IDS[:1]}) == 16


@pytest.mark.parametrize(
    ("unit", "key", "expected"),
    [("auto", "a.0", ("tokens", 64)), ("points", "a.0", ("points", 64)), ("samples", "a.0", ("samples", 4))],
)
def test_a_tensor_may_be_named(unit, key, expected):
    batch = {"a": [IDS]}
    name, count = counter(unit, key, batch)
    assert (name, count(batch)) == expected


def test_a_function_counts_what_it_likes():
    name, count = counter("frames", lambda batch: len(batch), [1, 2, 3])
    assert (name, count([1, 2])) == ("frames", 2)


def test_a_batch_that_has_none_is_refused():
    with pytest.raises(ValueError, match="count=a function of the batch"):
        counter("tokens", None, IMAGE)
    with pytest.raises(ValueError, match="no tensor"):
        counter("auto", None, ["text"])


def test_a_name_that_is_not_there_lists_those_that_are():
    with pytest.raises(ValueError, match=r"input_ids \[4, 16\].*Use one of these names"):
        counter("auto", "inputs", {"input_ids": IDS})
