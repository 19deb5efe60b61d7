from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ups.insight.advise.linear_shapes import (
    Layer,
    Product,
    layers_in_step,
    layers_with_rows,
    names_of,
)


class Stepping(nn.ModuleDict):
    """Linear layers, and a training step given as a function of them."""

    def __init__(self, step, **layers):
        super().__init__(layers)
        self.training_step = MethodType(step, self)

    def found(self, batch):
        return layers_in_step(self, [*self], batch)


def linears(*names):
    return {name: nn.Linear(4, 4) for name in names}


def test_rows_and_calls_of_each_layer():
    def step(model, batch):
        x = model["a"](batch)
        model["b"](x)
        model["b"](input=x[:1])

    model = Stepping(step, a=nn.Linear(4, 8), b=nn.Linear(8, 4), idle=nn.Linear(4, 4))
    assert model.found(torch.ones(3, 5, 4)) == [
        Layer("a", {Product(15, 4, 8): 1}, dgrad=False),
        Layer("b", {Product(15, 8, 4): 1, Product(5, 8, 4): 1}),
    ]
    assert not model["a"]._forward_pre_hooks


def test_gradients_that_are_not_computed_are_known():
    def step(model, batch):
        x = model["frozen"](batch)
        model["head"](model["base"](x + model["adapter"](x)))

    model = Stepping(step, **linears("frozen", "adapter", "base", "head"))
    for name in ("frozen", "base"):
        model[name].requires_grad_(False)
    found = {layer.name: (layer.dgrad, layer.wgrad) for layer in model.found(torch.ones(2, 4))}
    assert found == {
        "frozen": (False, False),
        "adapter": (False, True),
        "base": (True, False),
        "head": (True, True),
    }
    assert [layer.wgrad for layer in layers_with_rows(dict(model.items()), 2)] == [False, True, False, True]


def test_a_reentrant_checkpoint_hides_no_gradient():
    def step(model, batch):
        checkpoint(model["a"], batch.requires_grad_(), use_reentrant=True)

    assert Stepping(step, **linears("a")).found(torch.ones(2, 4))[0].dgrad


def test_a_step_may_read_values():
    def step(model, batch):
        loss = model["a"](batch).sum()
        assert float(f"{loss.item():.1f}") == 1.0

    assert Stepping(step, **linears("a")).found(torch.ones(2, 4))[0].calls == {Product(2, 4, 4): 1}


@pytest.mark.parametrize(
    ("step", "batch", "reason"),
    [
        (lambda model, batch: model["a"](batch[batch.nonzero()]), torch.ones(2, 4), "nonzero"),
        (lambda model, batch: next(batch), (x for x in ()), "the batch, a generator"),
    ],
    ids=["values", "generator"],
)
def test_a_step_that_cannot_run_on_fake_tensors_asks_for_the_rows(step, batch, reason):
    with pytest.raises(ValueError, match=f"Stepping.training_step .*{reason}.*tokens="):
        Stepping(step, **linears("a")).found(batch)


def test_fused_products_have_names_and_flops():
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
