import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from lightning_ups.transforms.step_graph import Rates, can_capture, device_rates

CPU = torch.device("cpu")


def groups():
    return [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.2}]


def test_a_step_reads_the_rates_of_the_device_and_leaves_floats():
    one, other = (AdamW(groups(), fused=True) for _ in range(2))
    rates = Rates(one, CPU)
    for lr in (0.1, 0.05):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = lr
            for group in optimizer.param_groups:
                group["params"][0].grad = torch.ones(2)
        rates.update()
        with device_rates(one, rates):
            one.step()
        other.step()
    assert [[p.tolist() for p in group["params"]] for group in one.param_groups] == [
        [p.tolist() for p in group["params"]] for group in other.param_groups
    ]
    assert [(group["lr"], group["capturable"]) for group in one.param_groups] == [(0.05, False), (0.2, False)]


def test_other_options_are_constants():
    optimizer = AdamW(groups(), fused=True)
    rates = Rates(optimizer, CPU)
    optimizer.param_groups[0]["lr"] = 1.0
    assert not rates.changed()
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    assert rates.changed()


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (AdamW(groups()), "fused=True"),
        (Adagrad(groups()), "not one of"),
        (AdamW(groups(), fused=True), None),
        (SGD(groups(), fused=True), None),
    ],
)
def test_fused_optimizers_of_torch_can_be_captured(optimizer, said):
    why = can_capture(optimizer)
    assert why is None if said is None else said in why


def test_step_hooks_cannot():
    optimizer = AdamW(groups(), fused=True)
    optimizer.register_step_post_hook(lambda *_: None)
    assert "step hooks" in can_capture(optimizer)
