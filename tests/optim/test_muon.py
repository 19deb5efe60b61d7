import copy

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Muon

from lightning_ups.optim.muon import MuonWithAdamW


def made(*, fused=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    matrices, vectors = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    others = [{"params": vectors, "weight_decay": 0.0}]
    return model, MuonWithAdamW(matrices, others, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), fused=fused)


def trained(model, *optimizers, steps):
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_it_is_muon_and_adamw():
    for fused in (False, True):
        model, optimizer = made(fused=fused)
        other = copy.deepcopy(model)
        parts = (
            Muon([other[0].weight, other[2].weight], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
            AdamW([other[0].bias, other[2].bias], lr=0.1, weight_decay=0.0, betas=(0.8, 0.9), fused=fused),
        )
        found, expected = trained(model, optimizer, steps=3), trained(other, *parts, steps=3)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_a_schedule_reaches_both_also_after_a_checkpoint():
    model, optimizer = made()
    trained(model, optimizer, steps=2)
    other, loaded = made()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, loaded):
        torch.optim.lr_scheduler.LambdaLR(each, lambda _: 0.5)
    assert [group["lr"] for group in loaded.param_groups] == [0.05, 0.05]
    found, expected = trained(other, loaded, steps=2), trained(model, optimizer, steps=2)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_a_closure_is_called_once():
    model, optimizer = made()
    calls = []

    def closure():
        calls.append(model(torch.ones(1, 6)).sum())
        calls[-1].backward()
        return calls[-1]

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1


def step_on_ranks():
    torch.manual_seed(0)
    mesh, start, gradient = init_device_mesh("cpu", (2,)), torch.randn(24, 16), torch.randn(24, 16)
    found = []
    for is_sharded in (False, True):
        weight, slope = (distribute_tensor(x, mesh, [Shard(0)]) if is_sharded else x for x in (start, gradient))
        weight = nn.Parameter(weight.clone())
        weight.grad = slope
        others = [{"params": [nn.Parameter(torch.zeros(1))]}]
        MuonWithAdamW([weight], others, lr=1.0, weight_decay=0.0, betas=(0.9, 0.9)).step()
        found.append((weight.full_tensor() if is_sharded else weight).detach() - start)
    return found


def test_a_shard_gets_its_part_of_the_step_of_the_whole_matrix(ranks):
    whole, sharded = ranks(step_on_ranks)
    assert (sharded - whole).norm() < 0.1 * whole.norm()  # Muon multiplies in bfloat16
