import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ups.state.checkpoint.stages import with_all_stages, without
from lightning_ups.transforms.pipeline import cut_model, drop_others


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))


def joined(groups):
    model = Chain()
    cut = cut_model(model, size=2, schedule="1F1B", rank=dist.get_rank(), blocks=["blocks.*"])
    drop_others(model, cut, device=torch.device("cpu"))
    names = [name for name, _ in model.named_parameters()]
    tree = {"state": {}, "param_groups": [{"params": names, "lr": 1.0}] * groups[dist.get_rank()]}
    return with_all_stages(model, tree, None)["param_groups"]


def test_groups_have_the_names_of_all_stages_in_the_order_of_the_model(ranks):
    assert ranks(joined, [1, 1]) == [{"params": [name for name, _ in Chain().named_parameters()], "lr": 1.0}]


def test_different_numbers_of_groups_are_refused(ranks):
    with pytest.raises(AssertionError, match="made 1 and 2 groups"):
        ranks(joined, [1, 2])


def test_a_whole_model_keeps_its_state():
    tree = {"foreign": {}}
    assert with_all_stages(Chain(), tree, None) is tree


def test_parameters_of_other_ranks_are_left_out():
    tree = {"state": {"a": {"step": 1}, "b": {"step": 2}}, "param_groups": [{"params": ["a", "b"], "lr": 1.0}]}
    assert without(tree, {"b"}) == {"state": {"a": {"step": 1}}, "param_groups": [{"params": ["a"], "lr": 1.0}]}
    assert without(tree, set()) is tree
