import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_ups.optim import MasteredOptimizer, MasterWeights, OffloadedOptimizer
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
