import pytest
import torch
from torch import nn

from lightning_ups.transforms.float8 import mx as float8_mx
from lightning_ups.transforms.float8.convert import convert_to_float8
from lightning_ups.transforms.float8.mx import mx_linear_from


def pair(*, bias=True):
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    return linear, mx_linear_from(emulate=True)(linear)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (7, 64), (2, 5, 64)], ids=str)
def test_it_is_near_bfloat16_for_any_number_of_rows(shape, bias):
    linear, made = pair(bias=bias)
    assert made.weight is linear.weight
    assert made.bias is linear.bias
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.bfloat16)
    found = []
    for layer in (linear, made):
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        result = layer(mine)
        result.float().square().mean().backward()
        found.append([value.float() for value in (result.detach(), mine.grad, linear.weight.grad.clone())])
    for right, value in zip(*found, strict=True):
        assert 0 < (value - right).norm() / right.norm() < 0.1


def test_dimensions_must_be_multiples_of_32():
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 48))
    done = convert_to_float8(model, recipe="mxfp8", include=["*"], emulate=True)
    assert done.converted == ("0",)
    assert done.skipped == {"1": "64 x 48 is no multiple of 32"}
    assert done.misfits == ("1",)


def test_a_torchao_without_it_says_which_has_it(monkeypatch):
    float8_mx._kind.cache_clear()
    monkeypatch.setattr(float8_mx, "require", lambda *args, **kwargs: object())
    with pytest.raises(ImportError, match=r"does not have.*Install torchao 0.18, or use recipe='tensorwise'"):
        mx_linear_from(emulate=True)
    float8_mx._kind.cache_clear()
