import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

from lightning_ups.transforms.sharding.mixed_step import kinds_of, one_kind_at_a_time


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * self.b(self.a(x))


def trained(how, sharded):
    model = Model()
    if sharded:
        fully_shard(model.a, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("one",)))
        fully_shard(model.b, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "three")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    x, own = torch.ones(2, 4), vars(optimizer).get("step")

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with one_kind_at_a_time(optimizer):
        for _ in range(3):
            loss = optimizer.step(closure)
            scheduler.step()
    weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return loss.item(), weights, len(kinds_of(optimizer)), groups, vars(optimizer).get("step") is own


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {}], ids=repr)
def test_two_meshes_and_a_whole_scalar_by_one_optimizer(ranks, how):
    loss, weights, kinds, groups, restored = ranks(trained, how, True)
    right, expected, one, _, _ = trained(how, False)
    assert loss == pytest.approx(right, rel=1e-5)
    torch.testing.assert_close(weights, expected)
    assert (kinds, one) == (3, 1)
    assert groups == [5]
    assert restored


def untouched():
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1, foreach=True)
    step = optimizer.step
    with one_kind_at_a_time(optimizer):
        return optimizer.step == step


def test_one_kind_needs_nothing():
    assert untouched()
