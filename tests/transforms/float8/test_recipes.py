from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ups.precision import Float8Precision
from lightning_ups.transforms.float8 import RECIPES, float8_linears, register
from lightning_ups.transforms.te import RECIPES as ENGINE_RECIPES
from tests.precision.test_float8 import Wide, fit

DOCS = Path(__file__).parents[3] / "docs" / "guides"


class HalfLinear(nn.Linear):
    """Multiplies with half of its weight: nothing that a training could overlook."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight / 2, self.bias)


def half(*, number_format, all_gather, emulate):
    assert (number_format, all_gather, emulate) == ("e4m3", False, True)

    def swap(linear):
        made = HalfLinear(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    return swap


@pytest.fixture
def halves():
    yield register(replace(RECIPES["rowwise"], name="halves", swap=half, layer="HalfLinear", multiple=32))
    del RECIPES["halves"]


def test_a_registered_recipe_trains(halves, tmp_path, caplog):
    caplog.set_level("INFO")
    ran = []

    class Watched(Wide):
        def on_train_batch_end(self, *_):
            ran.append([type(m).__name__ for m in self.modules()].count("HalfLinear"))

    fit(tmp_path, Float8Precision(recipe="halves", emulate=True), model=Watched())
    assert ran
    assert min(ran) > 0
    assert "6 linear layers multiply in float8, halves" in caplog.text


def test_a_registered_recipe_is_asked_what_it_can(halves):
    with pytest.raises(ValueError, match=r"'halves' is given with all_gather=True.*one for each row.*'tensorwise'"):
        Float8Precision(recipe="halves", all_gather=True)
    with pytest.raises(ValueError, match=r"'halves' is given with number_format='hybrid'.*'tensorwise'"):
        Float8Precision(recipe="halves", number_format="hybrid")
    assert not halves.fits(nn.Linear(48, 32))
    assert halves.fits(nn.Linear(64, 32))
    assert not halves.fits(nn.Linear(64, 32), tensor_size=2)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="'rowwise' is registered already"):
        register(replace(RECIPES["mxfp8"], name="rowwise"))


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_and_is_undone(name, tmp_path):
    trains_and_is_undone(name, tmp_path)


def trains_and_is_undone(name, tmp_path):
    model = Wide()
    before, types = {key: value.clone() for key, value in model.state_dict().items()}, set()
    model.on_train_batch_end = lambda *_: types.update(type(m).__name__ for m in model.layers.modules())
    fit(tmp_path, Float8Precision(recipe=name, emulate=True), model=model)
    assert RECIPES[name].layer in types
    assert model.losses[-1] < model.losses[0]
    after = model.state_dict()
    assert [*after] == [*before]
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert not any(torch.equal(after[key], value) for key, value in before.items())
    assert not float8_linears(model)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_docs_have_a_row_for_each_recipe(recipe):
    assert row_of(recipe, (DOCS / "precision.md").read_text().splitlines())


def row_of(recipe, lines):
    major, minor = recipe.capability
    begin = f"| `{recipe.name}` | one for {recipe.scales}"
    end = f"| capability {major}.{minor}, such as {recipe.gpus} |"
    return next((line for line in lines if line.startswith(begin) and line.endswith(end)), None)


@pytest.mark.parametrize("recipe", ENGINE_RECIPES.values(), ids=ENGINE_RECIPES)
def test_the_docs_have_a_row_for_each_recipe_of_transformer_engine(recipe):
    row = f"| `{recipe.name}` | {recipe.scales} | {recipe.needs} | {'yes' if recipe.compiles else 'refused'} |"
    assert row in (DOCS / "te.md").read_text().splitlines()
