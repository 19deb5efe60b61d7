import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_ups.transforms.shards_in_steps import plain_from_shards, refusing_gradients_of_shards


def shard_of(values):
    return nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)]))


def made():
    shard = shard_of(torch.ones(4, 2, dtype=torch.float64))
    with plain_from_shards():
        zeros, full = shard.new_zeros(3), shard.data.new_full((2,), 5.0, dtype=torch.float32)
    return type(zeros) is Tensor, zeros.dtype, full.tolist(), "new_zeros" in vars(DTensor)


def test_what_a_shard_makes_is_plain(ranks):
    assert ranks(made) == (True, torch.float64, [5.0, 5.0], False)


def differentiated():
    shard, x = shard_of(torch.ones(4, 2)), torch.ones(2, requires_grad=True)
    with refusing_gradients_of_shards("training_step"):
        (slope,) = torch.autograd.grad((x * 3).sum(), x)
        with pytest.raises(RuntimeError, match=r"^training_step calls .*Use strategy='ddp'\.$"):
            torch.autograd.grad((shard * 2).full_tensor().sum(), [shard])
    torch.autograd.grad((shard * 2).full_tensor().sum(), [shard])
    return slope.tolist()


def test_gradients_of_shards_are_refused_and_others_are_not(ranks):
    assert ranks(differentiated) == [3.0, 3.0]
