import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_ups._compat.shard_data import shard_data_written


def written():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    refused = []
    with shard_data_written(), shard_data_written():
        parameter.data = parameter.data * 3
        others = (
            torch.zeros(4, 2),
            distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()]),
            parameter.detach().double(),
        )
        for values in others:
            with pytest.raises(ValueError, match="distribute_tensor") as error:
                parameter.data = values
            refused.append(str(error.value))
        (parameter * 2).sum().backward()
    return parameter.full_tensor().tolist(), parameter.grad.full_tensor().tolist(), refused


def test_values_that_are_set_are_the_shards(ranks):
    values, gradient, refused = ranks(written)
    assert values == [[3.0, 3.0]] * 4
    assert gradient == [[2.0, 2.0]] * 4
    assert ["is not split, of torch.float32 and on cpu." in text for text in refused] == [True, False, False]
    assert "is split as (Replicate(),), of" in refused[1]
    assert "of torch.float64" in refused[2]


def test_torchs_own_is_put_back():
    before = "data" in vars(DTensor)
    with shard_data_written():
        assert "data" in vars(DTensor)
    assert ("data" in vars(DTensor)) is before
