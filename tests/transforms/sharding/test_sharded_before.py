from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ups.transforms.sharding.sharded_before import (
    check_same,
    recall,
    refuse_unshardable,
    remember,
)


@dataclass(frozen=True)
class One:
    param_dtype: torch.dtype | None = None
    blocks: int = 1


@dataclass(frozen=True)
class Other:
    blocks: int = 1


def check(before, now, layout=(("data", 2),)):
    check_same(nn.Linear(1, 1), SimpleNamespace(options=before, layout=(("data", 2),)), now, layout=layout)


def test_the_same_is_kept():
    check(One(), One())


@pytest.mark.parametrize(
    ("now", "layout", "text"),
    [
        (One(blocks=2), (("data", 2),), r"with blocks=1, and this run asks for blocks=2.*Keep the settings"),
        (One(param_dtype=torch.bfloat16), (("data", 2),), r"asks for param_dtype=torch.bfloat16.*Keep the precision"),
        (One(), (("data", 4),), r"mesh=\(\('data', 2\),\).*mesh=\(\('data', 4\),\)"),
        (Other(), (("data", 2),), r"with another strategy.*Keep the strategy of the earlier run"),
    ],
)
def test_another_way_is_refused_by_name(now, layout, text):
    with pytest.raises(ValueError, match=rf"(?s)^Linear was sharded by an earlier run.*{text}"):
        check(One(), now, layout)


def test_a_record_lives_as_long_as_its_model():
    model, twin = nn.Linear(1, 1), nn.Linear(1, 1)
    remember(model, "record")
    assert recall(model) == "record"
    assert recall(twin) is None


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_without_a_shape_is_refused():
    refuse_unshardable(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="The parameter weight has no shape yet"):
        refuse_unshardable(nn.LazyLinear(1))


class TwoOverOneMemory(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        flat = torch.arange(40.0)
        self.a.weight.data = flat[:16].view(4, 4)
        self.b.weight.data = flat[part : part + 16].view(4, 4)


@pytest.mark.parametrize("part", [0, 12])
def test_two_parameters_in_one_memory_are_refused(part):
    with pytest.raises(
        ValueError, match=r"a\.weight and b\.weight are two parameters that share memory.*Share the parameter itself"
    ):
        refuse_unshardable(TwoOverOneMemory(part))


def test_neighbours_in_one_memory_are_not_nor_what_is_tied_or_on_meta():
    refuse_unshardable(TwoOverOneMemory(16))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    refuse_unshardable(tied)
    refuse_unshardable(TwoOverOneMemory(0).to("meta"))
    refuse_unshardable(nn.LSTM(4, 4))
