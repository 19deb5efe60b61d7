import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_ups._compat.lightning.finetuning import finetuning_by_identity


def kinds():
    mesh = init_device_mesh("cpu", (2,))
    whole, again = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    part, other = (nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)])) for _ in range(2))
    optimizer = torch.optim.SGD([whole, part], lr=0.1)
    with pytest.raises(RuntimeError, match="got mixed"):
        BaseFinetuning.filter_on_optimizer(optimizer, [again, other])
    with finetuning_by_identity():
        left = BaseFinetuning.filter_on_optimizer(optimizer, [whole, again, part, other])
    return [p is q for p, q in zip(left, [again, other], strict=True)]


def test_parameters_of_both_kinds_are_told_from_equal_ones(ranks):
    assert ranks(kinds) == [True, True]


def test_it_is_put_back():
    before = BaseFinetuning.filter_on_optimizer
    with finetuning_by_identity():
        assert BaseFinetuning.filter_on_optimizer is not before
    assert BaseFinetuning.filter_on_optimizer is before
