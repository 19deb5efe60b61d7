import torch
from torch import nn
from torch.optim import SGD

from lightning_ups.optim import MasteredOptimizer, MasterWeights
from lightning_ups.optim.offload.source import HostMaster, MasteredSource
from tests.optim.offloading import Net


def mastered(model, wrapper=None):
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(model.parameters(), lr=0.1), masters, wrapper=wrapper)
    return optimizer, masters


def test_behind_a_wrapper_only_what_it_reduced_counts():
    model = Net()
    optimizer, masters = mastered(model, wrapper=nn.Identity())
    source = MasteredSource(optimizer)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    assert source.gradient(model[0].weight) is None
    masters.of[model[0].weight].grad = torch.ones(128, 64)
    assert source.gradient(model[0].weight).dtype is torch.float32


def test_masters_of_a_group_that_is_added_later_are_held_and_given_back_like_others():
    model = Net()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(model[0].parameters(), lr=0.1), masters)
    source = MasteredSource(optimizer)
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    assert {type(key) for _, _, key in source.pairs()} == {HostMaster}
    source.undo()
    assert {type(master) for master in masters.of.values()} == {nn.Parameter}


def test_a_master_on_the_host_has_its_gradient_on_the_device():
    model = Net()
    optimizer, masters = mastered(model)
    source = MasteredSource(optimizer)
    master = masters.of[model[0].weight]
    assert {type(key) for *_, key in source.pairs()} == {HostMaster}
    master.grad = torch.empty(128, 64, device="meta")  # a parameter of torch's would refuse it
    assert master.grad.device.type == "meta"
    del master.grad
    assert master.grad is None
    assert type(master.detach()) is torch.Tensor
    source.undo()
    assert type(master) is nn.Parameter
    assert master.grad is None
