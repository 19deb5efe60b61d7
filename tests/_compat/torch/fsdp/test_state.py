import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import (
    allocate,
    begin_forward,
    end_forward,
    expect_backward,
    gather_with_root,
    held_parameters,
    initialise,
    settle,
    sharding_policy,
    unreduced,
)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))


def pair(policy=None):
    model = Pair()
    mesh = init_device_mesh("cpu", (2,))
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    initialise(model)
    return model


def types(model):
    return {name: isinstance(p, DTensor) for name, p in model.named_parameters()}


def steps():
    model = pair()
    begin_forward(model)
    during = types(model)
    loss = (model.b(model.a(torch.ones(2, 4))) * model.own).sum()
    end_forward(model)
    expect_backward(model, loss)
    loss.backward()
    return during["own"], types(model), model.own.grad is not None, unreduced(model)


def test_a_step_is_a_forward_of_the_root(ranks):
    during, after, reduced, left = ranks(steps)
    assert not during
    assert all(after.values())
    assert reduced
    assert left == []


def aborted(discard):
    model = pair()
    model.set_requires_gradient_sync(False)
    begin_forward(model)
    model.a(torch.ones(2, 4)).sum().backward()
    begin_forward(model)
    model.a(torch.ones(2, 4))
    settle(model, discard=discard)
    kept = [h._unsharded_param.grad is not None for _, _, g, n, h in held_parameters(model) if n == "a.weight"]
    return types(model), kept


@pytest.mark.parametrize("discard", [True, False])
def test_settling_leaves_shards_and_keeps_gradients_unless_told(ranks, discard):
    after, kept = ranks(aborted, discard)
    assert all(after.values())
    assert kept == [not discard]


def moved():
    model, expected = pair(), Pair()
    for m in (model, expected):
        if m is model:
            begin_forward(m)
        x = torch.ones(2, 4)
        weight = m.b.weight
        if m is model:
            (handle,) = [h for _, _, _, name, h in held_parameters(m) if name == "b.weight"]
            before = handle.sharded_param
            weight = gather_with_root(m, handle)
        loss = (m.b(m.a(x) @ weight) * m.own).sum()
        if m is model:
            end_forward(m)
            expect_backward(m, loss)
        loss.backward()
    same = model.b.weight is before
    return same, torch.allclose(model.b.weight.grad.full_tensor(), expected.b.weight.grad), unreduced(model)


def test_a_parameter_that_the_root_takes_over_is_the_same_and_reduced_once(ranks):
    assert ranks(moved) == (True, True, [])


class Bare(nn.Module):
    """Blocks of one weight each, all of which the backward gathers again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))


def emptied():
    model, expected, x = Bare(), Bare(), torch.ones(2, 4)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    initialise(model)
    begin_forward(model)
    y = model.layers[1](model.layers[0](x))
    handles = {name: handle for _, _, _, name, handle in held_parameters(model)}
    weight = gather_with_root(model, handles["layers.0.weight"])
    loss = (model.layers[2](y) @ weight).sum()
    end_forward(model)
    expect_backward(model, loss)
    loss.backward()
    right = (expected.layers[2](expected.layers[1](expected.layers[0](x))) @ expected.layers[0].weight).sum()
    right.backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return [torch.allclose(p.grad.full_tensor(), e.grad) for p, e in pairs], unreduced(model)


def test_a_group_whose_only_parameter_the_root_takes_over_is_not_gathered_ahead(ranks):
    assert ranks(emptied) == ([True] * 3, [])


def never_run():
    """``b`` first runs in the second microbatch."""
    model = pair(policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        begin_forward(model)
        x = model.a(torch.ones(2, 4)) * model.own
        loss = (model.b(x) if last else x).sum()
        end_forward(model)
        expect_backward(model, loss)
        loss.backward()
    return [module.weight.grad is not None for module in (model.a, model.b)], unreduced(model)


def test_a_block_that_first_runs_in_a_later_microbatch_is_reduced(ranks):
    assert ranks(never_run) == ([True, True], [])


def from_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    allocate(model, shards_on=torch.device("cpu"), rest_on=torch.device("cpu"))
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    return devices, types(model)["0.weight"], sharding_policy(model).param_dtype


def test_memory_for_shards_and_buffers(ranks):
    assert ranks(from_meta) == ({"cpu"}, True, torch.bfloat16)


class Many(nn.Module):
    def __init__(self, num):
        super().__init__()
        self.own = nn.ParameterList([torch.ones(4) for _ in range(num)])

    def forward(self, x):
        return sum(x * p for p in self.own)


def reads_in_backward(num, counted="unsharded_accumulated_grad"):
    model = Many(num)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    initialise(model)
    seen = []

    def read(held, name):
        seen.append(name)
        return object.__getattribute__(held, name)

    for _, _, _, _, held in held_parameters(model):
        held.__class__ = type("Counted", (type(held),), {"__getattribute__": read})
    loss = model(torch.ones(2, 4)).sum()
    seen.clear()
    loss.backward()
    return seen.count(counted)


def test_a_backward_looks_at_each_parameter_of_a_group_a_few_times(ranks):
    few, many = ranks(reads_in_backward, 4), ranks(reads_in_backward, 32)
    assert few >= 4
    assert many <= 8 * few


def reached_by_the_last_microbatch():
    """The weight of ``b`` is read outside, as that of ``a`` is, in the last microbatch alone."""
    model = pair(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x, weights = torch.ones(2, 4, dtype=torch.bfloat16), {}
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        begin_forward(model)
        for name in ("a", "b") if not weights else ():
            (handle,) = [h for _, _, _, full, h in held_parameters(model) if full == f"{name}.weight"]
            weights[name] = gather_with_root(model, handle)
        loss = sum((x @ weights[name]).sum() for name in (("a", "b") if last else ("a",)))
        end_forward(model)
        expect_backward(model, loss)
        loss.backward()
    return [module.weight.grad.full_tensor().unique().tolist() for module in (model.a, model.b)]


def test_what_the_root_took_over_is_reduced_in_the_type_of_what_it_joined(ranks):
    assert ranks(reached_by_the_last_microbatch) == [[4.0], [2.0]]


def reduced_over_copies():
    """Of three parameters of one group each microbatch reaches another, and none the third."""
    model = Many(3)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    initialise(model)
    found = []
    for _ in range(2):
        for index in (0, 1):
            model.set_requires_all_reduce(index == 1)
            begin_forward(model)
            loss = (torch.full((4,), 1.0 + index + dist.get_rank()) * model.own[index]).sum()
            end_forward(model)
            expect_backward(model, loss)
            loss.backward()
        found.append([None if p.grad is None else p.grad.full_tensor().unique().tolist() for p in model.own])
        model.zero_grad()
    return found


def test_what_is_summed_before_it_is_reduced_over_copies_is_each_parameters_own(ranks):
    assert ranks(reduced_over_copies) == [[[1.5], [2.5], None]] * 2
