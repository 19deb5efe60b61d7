import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups._compat.torch.fake_tensors import FakeTensorMode
from lightning_ups.optim import MasteredOptimizer, MasterWeights, adamw_step
from lightning_ups.optim.adamw_slots import slots_of
from lightning_ups.optim.adamw_step import (
    AdamWStep,
    OneKernel,
    Settings,
    one_kernel,
    reference_step,
    settings_of,
    suits_one_kernel,
)

SHAPES = [(), (1,), (5,), (33, 17), (3, 70001), (64, 64)]
EVEN = [(64, 64), (40000,), (8,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def anywhere(monkeypatch):
    """Take every device for one that has the kernel; elsewhere than on a GPU the specification stands in for it."""
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)


def parameters(device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def draw_gradients(weights, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=generator).to(w.device) for w in weights]


def settings(**options):
    values = {**OPTIONS, **options}
    beta1, beta2 = values.pop("betas")
    return Settings(beta1=beta1, beta2=beta2, **values)


def by_torch(weights, *, steps, coefficient=1.0, dtype=torch.float32):
    optimizer = AdamW(weights, **OPTIONS, fused=True)
    for step in range(steps):
        for weight, gradient in zip(weights, draw_gradients(weights, step), strict=True):
            weight.grad = gradient.to(dtype).float() * coefficient
        optimizer.step()
    return optimizer


def by_ours(weights, *, steps, coefficient=None, dtype=torch.float32, make=AdamWStep, copies=None):
    optimizer, step_once = AdamW(weights, **OPTIONS, fused=True), make()
    for step in range(steps):
        slots = slots_of(
            optimizer,
            weights,
            gradients=[gradient.to(dtype) for gradient in draw_gradients(weights, step)],
            copies=[*map((copies or {}).get, weights)],
        )
        step_once(slots, settings(), coefficient=coefficient)
    return optimizer


def assert_close(ours, theirs, weights, others):
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-6, atol=2e-6)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[weight][name], theirs.state[other][name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [None, 0.37])
def test_the_specification_is_torchs_fused_step(dtype, coefficient):
    weights, others = parameters(), parameters()
    ours = by_ours(weights, steps=4, dtype=dtype, coefficient=coefficient and torch.tensor(coefficient))
    theirs = by_torch(others, steps=4, dtype=dtype, coefficient=coefficient or 1.0)
    assert_close(ours, theirs, weights, others)
    free = by_ours(parameters(), steps=4, dtype=dtype)
    assert (coefficient is None) == torch.equal(
        free.state_dict()["state"][3]["exp_avg"], ours.state_dict()["state"][3]["exp_avg"]
    )


def test_copies_are_the_weights_rounded():
    weights = parameters()
    copies = {w: torch.empty_like(w, dtype=torch.bfloat16) for w in weights[1:]}
    by_ours(weights, steps=2, copies=copies)
    assert all(torch.equal(low, weight.to(torch.bfloat16)) for weight, low in copies.items())


def test_state_of_a_step_that_was_not_fused_is_used():
    weights, others = parameters(), parameters()
    plain = AdamW(weights, **OPTIONS, foreach=False)
    for weight, gradient in zip(weights, draw_gradients(weights, 0), strict=True):
        weight.grad = gradient
    plain.step()
    AdamWStep()(slots_of(plain, weights, gradients=draw_gradients(weights, 1)), settings())
    assert_close(plain, by_torch(others, steps=2), weights, others)


LEFT_TO_TORCH = {
    "amsgrad": lambda w: AdamW(w, amsgrad=True),
    "maximize": lambda w: AdamW(w, maximize=True),
    "capturable": lambda w: AdamW(w, capturable=True),
    "differentiable": lambda w: AdamW(w, differentiable=True),
    "foreach": lambda w: AdamW(w, foreach=True),
    "unfused": lambda w: AdamW(w, fused=False),
    "tensor": lambda w: AdamW(w, lr=torch.tensor(1e-3), fused=True),
    "l2": lambda w: Adam(w, weight_decay=0.1),
    "subclass": lambda w: type("Mine", (AdamW,), {})(w),
    "sgd": lambda w: SGD(w),
    "double": lambda w: AdamW([p.detach().double().requires_grad_() for p in w]),
}


@pytest.mark.parametrize("make", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
def test_what_the_kernel_does_not_do_is_left_to_the_optimizer(anywhere, make):
    optimizer = make(parameters())
    assert settings_of(optimizer, optimizer.param_groups[0]) is None
    assert not suits_one_kernel(optimizer)


def test_what_a_gpu_would_do_is_known_without_one():
    optimizer = AdamW(parameters())
    assert one_kernel(optimizer) is None
    assert suits_one_kernel(optimizer)
    with FakeTensorMode():
        assert suits_one_kernel(Adam([nn.Parameter(torch.empty(2, 3))], lr=1e-3))
        assert not suits_one_kernel(AdamW([nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16))]))


def test_a_step_that_was_replaced_is_not_passed_over(anywhere):
    optimizer = AdamW(parameters())
    ExponentialLR(optimizer, 0.9)  # counts steps by a step of its own, which is no other
    assert settings_of(optimizer, optimizer.param_groups[0]) is not None
    optimizer.step = lambda closure=None: None
    assert settings_of(optimizer, optimizer.param_groups[0]) is None


def test_adam_without_decay_is_adamw_without_decay(anywhere):
    optimizer = Adam(parameters(), lr=1e-2)
    assert settings_of(optimizer, optimizer.param_groups[0]) == Settings(1e-2, 0.9, 0.999, 1e-8, 0.0)


def train(*, steps, accumulate=False, clip=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    masters = MasterWeights(model, dtype=torch.bfloat16)
    groups = [{"params": [*model[0].parameters()], "lr": 1e-2}, {"params": [*model[1:].parameters()]}]
    optimizer = MasteredOptimizer(AdamW(groups, lr=3e-3), masters, accumulate=accumulate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(1 + accumulate):
            hidden = model[0](torch.linspace(-1, 1, 32).reshape(4, 8).bfloat16() * (part + 1))
            loss = model[2](model[1](hidden.float()).bfloat16()).float().square().mean()
            loss.backward()
        if clip:
            optimizer.take_clip_coefficient(torch.tensor(0.25))
        optimizer.step()
        losses.append(loss.item())
        assert all(p.grad is None for p in model.parameters() if p in masters.of)
    return losses, model, optimizer, masters


@pytest.mark.parametrize("options", [{}, {"accumulate": True}, {"clip": True}], ids=["plain", "accumulate", "clip"])
def test_a_step_over_masters_is_that_of_the_optimizer_by_itself(monkeypatch, options):
    expected, _, theirs, _ = train(steps=5, **options)
    calls = []
    monkeypatch.setattr(adamw_step, "_has_kernel", lambda device: True)
    monkeypatch.setattr(adamw_step, "reference_step", lambda *a, **k: (calls.append(1), reference_step(*a, **k)))
    losses, model, ours, masters = train(steps=5, **options)
    assert calls, "the one kernel's place was taken"
    assert losses == pytest.approx(expected, rel=2e-3)
    assert all(torch.equal(p, m.to(torch.bfloat16)) for p, m in masters.of.items())
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        assert list(mine["state"][index]) == list(state)
        # The losses part by the rounding of weights to bfloat16, and the gradients with them.
        torch.testing.assert_close(mine["state"][index]["exp_avg"], state["exp_avg"], rtol=0.05, atol=2e-3)
    assert len(model.state_dict()) == len(set(model.state_dict()))


def test_writes_of_its_own_are_not_taken_for_writes_of_others(anywhere):
    _, model, _, masters = train(steps=4)
    before = {p: m.clone() for p, m in masters.of.items()}
    masters.take_over(by_value=True)
    assert all(torch.equal(masters.of[p], m) for p, m in before.items()), "rounded copies did not go back"
    assert not torch.equal(next(iter(before.values())), next(iter(model.parameters())).float())


def test_the_flag_of_gradient_scalers_forbids_the_step_and_their_scale_is_left_to_torch(anywhere):
    weights = parameters()
    optimizer = AdamW(weights, **OPTIONS, fused=True)
    for weight, gradient in zip(weights, draw_gradients(weights, 0), strict=True):
        weight.grad = gradient
    before, optimizer.grad_scale = [w.detach().clone() for w in weights], None
    for flag in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(flag)
        OneKernel(optimizer).step(optimizer, one_kernel(optimizer))
        assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True)) == bool(flag)
        assert {optimizer.state[w]["step"].item() for w in weights} == {1 - flag}
    optimizer.grad_scale = torch.ones(())
    assert one_kernel(optimizer) is None
