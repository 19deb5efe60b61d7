import pytest
import torch
from torch import nn

from lightning_ups.insight.verify.float8_rounding import rounded, rounded_linears
from lightning_ups.transforms.float8.convert import convert_to_float8

RECIPES = {
    "tensorwise": "tensor",
    "tensorwise hybrid": "tensor, hybrid",
    "rowwise": "row",
    "rowwise_with_gw_hp": "row, gradient of the weight exact",
    "mxfp8": "block",
}


def data(rows=64, spread=2):
    torch.manual_seed(1)
    # Rows of different sizes, which a scale for each keeps apart.
    return torch.randn(rows, 128) * torch.logspace(-spread, spread, rows)[:, None]


def gradients(model, x):
    x = x.clone().requires_grad_()
    result = model(x)
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result))
    found = result.detach(), x.grad, model[0].weight.grad
    model.zero_grad()
    return [value.float() for value in found]


def error(found, right):
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize(("recipe", "rounding"), RECIPES.items())
def test_rounding_has_the_error_of_the_recipe(recipe, rounding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96, bias=False))
    x = data()
    exact = gradients(model, x)
    with rounded_linears(model, rounding):
        ours = gradients(model, x)
    recipe, *hybrid = recipe.split()
    convert_to_float8(model, recipe=recipe, number_format=(*hybrid, "e4m3")[0], include=["0"], emulate=True)
    theirs = gradients(model, x)
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert error(mine, right) == pytest.approx(error(other, right), rel=0.35, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_any_number_of_rows(rows):
    model = nn.Sequential(nn.Linear(128, 96))
    with rounded_linears(model, "block"):
        assert all(torch.isfinite(value).all() for value in gradients(model, data(rows)))


def test_a_scale_for_each_row_keeps_small_rows():
    x = data(spread=3)
    errors = {per: ((rounded(x, per=per) - x)[0].norm() / x[0].norm()).item() for per in ("tensor", "row", "block")}
    assert errors["row"] < 0.05 < errors["tensor"]
    assert errors["block"] < 0.05
