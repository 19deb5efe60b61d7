import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ups.insight.advise.shapes import Layer, Product, layers_of, layers_with_rows, names_of, products_of


def test_rows_and_calls_of_each_layer():
    model = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 4), "idle": nn.Linear(4, 4)})

    def step():
        x = model["a"](torch.ones(3, 5, 4))
        model["b"](x)
        model["b"](input=x[:1])

    found = layers_of(dict(model.items()), step)
    assert found == [
        Layer("a", {Product(15, 4, 8): 1}, dgrad=False),
        Layer("b", {Product(15, 8, 4): 1, Product(5, 8, 4): 1}),
    ]
    assert not model["a"]._forward_pre_hooks


def test_rows_that_are_given_are_those_of_one_call():
    linears = {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
    seen = layers_of(linears, lambda: linears["down"](linears["up"](torch.empty(5, 4, requires_grad=True))))
    assert layers_with_rows(linears, 5) == seen


def test_gradients_that_are_not_computed_are_known():
    linears = {name: nn.Linear(4, 4) for name in ("frozen", "adapter", "base", "head")}
    for name in ("frozen", "base"):
        linears[name].requires_grad_(False)

    def step():
        x = linears["frozen"](torch.ones(2, 4))
        linears["head"](linears["base"](x + linears["adapter"](x)))

    found = {layer.name: (layer.dgrad, layer.wgrad) for layer in layers_of(linears, step)}
    assert found == {
        "frozen": (False, False),
        "adapter": (False, True),
        "base": (True, False),
        "head": (True, True),
    }
    assert [layer.wgrad for layer in layers_with_rows(linears, 2)] == [False, True, False, True]


def test_what_a_checkpoint_runs_without_gradients_first_has_them_later():
    linear, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    assert layers_of({"a": linear}, lambda: checkpoint(linear, x, use_reentrant=True))[0].dgrad


def test_shapes_are_counted_over_layers():
    layers = [Layer(name, {Product(2, 4, 4): 3}) for name in "ab"]
    assert products_of(layers) == {Product(2, 4, 4): 6}
    assert Product(2, 3, 5).flops == 6 * 30
    assert str(Product(2, 3, 5)) == "2 x 3 x 5"


def test_what_is_computed_as_one_says_so():
    network = Product(2, 4, 8, norm="RMSNorm", activation="swiglu")
    assert str(network) == "2 x 4 x 8 by swiglu and back after RMSNorm"
    assert network.flops == 3 * Product(2, 4, 8).flops
    assert Product(2, 4, 8, norm="LayerNorm", activation="gelu").flops == 2 * Product(2, 4, 8).flops
    assert not network.is_plain
    assert Product(2, 4, 8).is_plain


def test_names_are_generalised_where_they_differ():
    shape, other = Product(2, 4, 4), Product(2, 4, 8)
    layers = [Layer(f"layers.{i}.{j}", {shape: 1}) for i in range(3) for j in (1,)] + [Layer("head", {other: 1})]
    assert names_of(layers, shape) == "layers.*.1"
    assert names_of(layers, other) == "head"
    many = [Layer(name, {shape: 1}) for name in "abcd"]
    assert names_of(many, shape) == "a, b, c, ..."
