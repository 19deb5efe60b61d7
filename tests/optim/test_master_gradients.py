from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer, reduce_into_masters
from tests.optim.test_master_weights import batch, by_specification, make_model, mastered, with_masters


def test_microbatches_are_added_in_float32():
    model, expected = make_model(), make_model()
    losses, masters, _ = mastered(model, steps=3, micro=4, accumulate=True)
    assert losses == by_specification(expected, steps=3, micro=4)
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(masters.of[p], e)
    rough, _, _ = mastered(make_model(), steps=3, micro=4)  # added in bfloat16
    assert rough != losses


def test_no_low_precision_gradient_is_kept_while_accumulating():
    model = make_model()
    _, optimizer = with_masters(model, accumulate=True)
    model(batch(torch.bfloat16)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.gradients()) == len(list(model.parameters()))
    optimizer.zero_grad()
    assert optimizer.gradients() == []


def test_a_parameter_without_gradient_keeps_its_value():
    model = make_model()
    masters, optimizer = with_masters(model, AdamW, lr=1.0)
    before = masters.of[model[2].weight].clone()
    model[0](batch(torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(masters.of[model[2].weight], before)
    assert not torch.equal(masters.of[model[0].weight], make_model()[0].weight)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_gradient_that_is_set_to_zero_and_not_to_none_steps_its_weight(offloaded, accumulate):
    def train(optimizer, model, dtype):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            used = model[:3] if step == 1 else model[:1]  # the second layer is used in one step, the norm in none
            used(batch(dtype)).float().square().mean().backward()
            optimizer.step()
        return model.state_dict()

    def make(model):
        return AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    plain, model = make_model(), make_model()
    right = train(make(plain), plain, torch.float32)
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(make(model), masters, accumulate=accumulate)
    found = train(OffloadedOptimizer(optimizer) if offloaded else optimizer, model, torch.bfloat16)
    start = make_model().state_dict()
    for name, value in right.items():
        assert (found[name] - value).norm() <= 0.1 * (value - start[name]).norm(), name


def test_what_is_unfrozen_has_its_microbatches_added_in_float32():
    weight = nn.Linear(1, 1, bias=False).requires_grad_(requires_grad=False)
    nn.init.zeros_(weight.weight)
    masters = MasterWeights(weight, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(SGD(weight.parameters(), lr=1.0), masters, accumulate=True)
    weight.requires_grad_()
    optimizer.zero_grad()
    for gradient in (1.0, 2**-9, 2**-9):
        weight(torch.tensor([[gradient]], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert weight.state_dict()["weight"].item() == -1 - 2**-8


def make_reduced():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def parts(micro, world):
    torch.manual_seed(1)
    return torch.randn(micro, world, 4, 8).to(torch.bfloat16)


def loss_of(model, x, *, micro):
    return model(x).float().square().mean() / micro


def on_a_rank(micro, reduced):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_reduced()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    wrapper = DistributedDataParallel(model)
    if reduced:
        reduce_into_masters(wrapper, masters)
    optimizer = MasteredOptimizer(
        AdamW(model.parameters(), lr=1e-2), masters, accumulate=micro > 1, wrapper=wrapper if reduced else None
    )
    first = None
    for _ in range(3):
        optimizer.zero_grad()
        for i, x in enumerate(parts(micro, world)):
            with nullcontext() if i == micro - 1 else wrapper.no_sync():
                loss_of(wrapper, x[rank], micro=micro).backward()
        first = first or [g.clone() for g in optimizer.gradients()]
        optimizer.step()
    return first, [masters.of[p].detach().clone() for p in model.parameters()]


def in_one_process(micro, world=2):
    """The specification: every gradient of a microbatch on a rank, added and averaged in float32."""
    model = make_reduced()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    inner, first = AdamW([masters.of[p] for p in model.parameters()], lr=1e-2), None
    for _ in range(3):
        totals = [torch.zeros_like(masters.of[p]) for p in model.parameters()]
        for x in parts(micro, world).flatten(0, 1):
            gradients = torch.autograd.grad(loss_of(model, x, micro=micro), list(model.parameters()))
            totals = [t + g.float() for t, g in zip(totals, gradients, strict=True)]
        for p, t in zip(model.parameters(), totals, strict=True):
            masters.of[p].grad = t / world
        first = first or [masters.of[p].grad.clone() for p in model.parameters()]
        inner.step()
        masters.write()
    return first, [masters.of[p].detach() for p in model.parameters()]


@pytest.mark.parametrize("micro", [1, 4])
def test_gradients_are_averaged_and_accumulated_in_float32(ranks, micro):
    gradients, weights = ranks(on_a_rank, micro, True)
    expected_gradients, expected = in_one_process(micro)
    for g, e in zip(gradients, expected_gradients, strict=True):
        assert g.dtype is torch.float32
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-8)  # the order of the sum is another
    for w, e in zip(weights, expected, strict=True):
        torch.testing.assert_close(w, e, rtol=1e-4, atol=1e-6)


def test_the_wrappers_own_reduction_is_rounded(ranks):
    gradients, _ = ranks(on_a_rank, 1, False)
    expected, _ = in_one_process(1)
    assert not torch.allclose(gradients[0].float(), expected[0], rtol=1e-6, atol=1e-8)


def with_seeds_of_their_own():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 8)
    masters = MasterWeights(model, dtype=torch.bfloat16)
    wrapper = DistributedDataParallel(model)
    reduce_into_masters(wrapper, masters)
    master = masters.of[model.weight].detach()
    both = [torch.empty_like(master) for _ in range(2)]
    dist.all_gather(both, master)
    torch.manual_seed(0)
    return (
        torch.equal(*both),
        torch.equal(both[0], nn.Linear(8, 8).weight),
        torch.equal(model.weight, master.bfloat16()),
    )


def test_ranks_begin_with_the_masters_of_the_first(ranks):
    assert ranks(with_seeds_of_their_own) == (True, True, True)


class Rotates(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(self.linear(x).float().unflatten(-1, (4, 2))) * self.phase)


def beside_complex_numbers():
    torch.manual_seed(0)
    model = Rotates()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    wrapper = DistributedDataParallel(model)
    reduce_into_masters(wrapper, masters)
    batches = parts(1, 2)[0]
    loss_of(wrapper, batches[dist.get_rank()], micro=1).backward()
    alone = [torch.autograd.grad(loss_of(model, x, micro=1), [model.phase])[0] for x in batches]
    return model.phase.grad, sum(alone) / 2


def test_complex_parameters_have_no_master_and_are_averaged(ranks):
    torch.testing.assert_close(*ranks(beside_complex_numbers))


class Parted(nn.Module):
    """Has a part that no rank uses, and one that only the first does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.first, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(self.shared(x)) if dist.get_rank() == 0 else self.shared(x)


def parted(micro, clipped):
    model = Parted()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    wrapper = DistributedDataParallel(model, find_unused_parameters=True)
    reduce_into_masters(wrapper, masters)
    inner = AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    optimizer = MasteredOptimizer(inner, masters, accumulate=micro > 1, wrapper=wrapper)
    before = {name: masters.of[p].detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        for i, x in enumerate(parts(micro, dist.get_world_size())):
            with nullcontext() if i == micro - 1 else wrapper.no_sync():
                wrapper(x[dist.get_rank()]).float().square().mean().backward()
        if clipped:
            assert len(optimizer.gradients()) == 4
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(masters.of[p], before[name])}
    states = {name for name, p in model.named_parameters() if inner.state.get(masters.of[p])}
    alike = [torch.zeros_like(p) for p in before.values()]
    for name, mean in zip(before, alike, strict=True):
        dist.all_reduce(mean.copy_(masters.of[model.get_parameter(name)]).div_(2))
    same = all(torch.equal(masters.of[p], mean) for p, mean in zip(model.parameters(), alike, strict=True))
    return moved, states, same


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clipped", [False, True])
def test_what_no_rank_uses_is_left_alone(ranks, micro, clipped):
    used = {f"{part}.{kind}" for part in ("shared", "first") for kind in ("weight", "bias")}
    assert ranks(parted, micro, clipped) == (used, used, True)


def refusal_on_a_rank():
    model = make_reduced()
    masters, wrapper = MasterWeights(model, dtype=torch.bfloat16), DistributedDataParallel(model)
    wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match=r"hook of the user's already.*Leave ddp_comm_hook out.*weights='autocast'"):
        reduce_into_masters(wrapper, masters)


def test_a_wrapper_that_has_a_hook_is_refused_with_what_to_leave_out(ranks):
    ranks(refusal_on_a_rank)
