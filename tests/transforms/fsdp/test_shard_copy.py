from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ups.transforms.fsdp.shard_copy import shard_alike


def alike():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model[1].weight = nn.Parameter(model[0].weight.T.contiguous())
    copy = deepcopy(model)
    expected = [p.detach().clone() for p in copy.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shard_alike(copy, model)
    shard_alike(copy, model)  # a second fit's
    same = [torch.equal(c.full_tensor(), e) for c, e in zip(copy.parameters(), expected, strict=True)]
    placed = [c.placements == p.placements for c, p in zip(copy.parameters(), model.parameters(), strict=True)]
    with torch.no_grad():
        for c, p in zip(copy.parameters(), model.parameters(), strict=True):
            c.lerp_(p, 0.5)  # what averaging does
    return same, placed


def test_a_copy_keeps_its_values_as_shards(ranks):
    same, placed = ranks(alike)
    assert all(same)
    assert all(placed)


def test_a_copy_of_another_module_is_refused():
    with pytest.raises(ValueError, match=r"(?s)other parameters.*Create all submodules in __init__"):
        shard_alike(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
