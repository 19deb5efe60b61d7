import pytest
import torch
from torch import nn

from lightning_ups._compat.lightning.skipping import clear_skip, skip_if, skips_on_device


def stepped(optimizer, parameter, flag):
    parameter.grad = torch.full_like(parameter, float("nan") if flag else 1.0)
    skip_if(optimizer, torch.tensor(float(flag)))
    optimizer.step()
    clear_skip(optimizer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_skipped_step_changes_nothing_bit_for_bit(kind, options):
    plain, guarded = (nn.Parameter(torch.ones(4)) for _ in range(2))
    by_hand = kind([plain], lr=0.1, weight_decay=0.1, fused=True, **options)
    optimizer = kind([guarded], lr=0.1, weight_decay=0.1, fused=True, **options)
    if kind is torch.optim.Adagrad and not skips_on_device(optimizer):
        pytest.skip("this torch's fused Adagrad reads no flag")
    assert skips_on_device(optimizer)
    for flag in (True, False, False, True, False):
        stepped(optimizer, guarded, flag)
        if not flag:
            plain.grad = torch.ones_like(plain)
            by_hand.step()
    assert torch.equal(plain, guarded)
    for name, value in by_hand.state[plain].items():
        assert torch.equal(value, optimizer.state[guarded][name]), name


def test_a_first_step_that_is_skipped_leaves_no_garbage(monkeypatch):
    stock = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: stock(*args, **kwargs).fill_(float("nan")))
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    stepped(optimizer, parameter, flag=True)
    stepped(optimizer, parameter, flag=False)
    assert torch.equal(parameter, torch.full((4,), 0.9))


def test_dampening_is_left_to_the_host():
    assert not skips_on_device(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9, dampening=0.1, fused=True))


def test_an_optimizer_that_is_not_fused_knows_no_flag():
    assert not skips_on_device(torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    assert not skips_on_device(torch.optim.RMSprop([nn.Parameter(torch.ones(1))]))


def test_a_flag_is_taken_back():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    skip_if(optimizer, torch.ones(()))
    clear_skip(optimizer)
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    clear_skip(optimizer)


def test_the_flag_goes_to_the_optimizer_that_steps():
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

    inner = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    outer = Outer(inner)
    assert skips_on_device(outer)
    skip_if(outer, torch.ones(()))
    assert "found_inf" in vars(inner)
    assert "found_inf" not in vars(outer)
