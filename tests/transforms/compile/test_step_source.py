import functools
import math
import random
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

from lightning_ups.transforms.compile.step_source import repeated_backward, unfit_for_compiling, uses_only_loss


def gradient_penalty(net, x):
    (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return grad.square().sum()


losses = types.ModuleType("losses")
losses.gradient_penalty = gradient_penalty


def through_another(net, x):
    return gradient_penalty(net, x)


class Plain(nn.Linear):
    def training_step(self, x):
        return self(x).sum()


class Direct(Plain):
    def training_step(self, x):
        return torch.autograd.grad(self(x).sum(), x, create_graph=True)


class Named(Plain):
    def training_step(self, x):
        return through_another(self, x)


class OfAModule(Plain):
    def training_step(self, x):
        return losses.gradient_penalty(self, x)


class Inner(Plain):
    def training_step(self, x):
        def loss():
            return torch.autograd.functional.hessian(self, x)

        return loss()


class Kept(Plain):
    @functools.lru_cache  # noqa: B019
    def training_step(self, x):
        self(x).sum().backward(retain_graph=True)


class Both(Kept, Direct):
    pass


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, None),
        (Direct, ("create_graph", "Direct.training_step")),
        (Named, ("create_graph", "gradient_penalty")),
        (OfAModule, ("create_graph", "gradient_penalty")),
        (Inner, ("create_graph", "Inner.training_step")),
        (Kept, ("retain_graph", "Kept.training_step")),
        (Both, ("create_graph", "Direct.training_step")),
    ],
)
def test_code_that_goes_backward_again_is_found(kind, expected):
    place = repeated_backward(nn.Sequential(nn.Linear(2, 2), kind(2, 2)))
    assert (place and (place.kind, place.where.rpartition(f"{__name__}.")[-1])) == expected


class Model(LightningModule):
    """Uses nothing but the loss, in each of the plain ways."""

    def __init__(self, net=None):
        super().__init__()
        self.net, self.other = net, None

    def validation_step(self, batch):
        return self.net(**batch).logits

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters())


class Logits(Model):
    def training_step(self, batch):
        outputs = self.net(**batch)
        return outputs.loss + outputs.logits.mean()


class Chained(Model):
    def training_step(self, batch):
        return self.net(**batch).loss


class Assigned(Model):
    def training_step(self, batch):
        outputs = self.net(**batch)
        self.log("loss", outputs["loss"])
        return {"loss": outputs.loss / self.net.config.steps}


class InHelper(Model):
    def loss(self, batch):
        return self.net(**batch)["loss"]

    def training_step(self, batch):
        return self.loss(batch)


class Inherited(Chained):
    pass


class Made(LightningModule):
    def __init__(self, kind):
        super().__init__()
        model = kind()
        model.config.use_cache = False
        self.net = model

    def training_step(self, batch):
        return self.net(**batch).loss


@pytest.mark.parametrize("kind", [Chained, Assigned, InHelper, Inherited, partial(Made, nn.Identity)])
def test_only_the_loss_is_used(kind, monkeypatch):
    monkeypatch.setattr(nn.Identity, "config", Any, raising=False)
    assert uses_only_loss(kind(), "net")
    assert not uses_only_loss(kind(), "other")


class Passed(Model):
    def training_step(self, batch):
        outputs = self.net(**batch)
        return self.trainer.accumulate(outputs)


class Returned(Model):
    def training_step(self, batch):
        return self.net(**batch)


class Kept(Model):
    def training_step(self, batch):
        self.outputs = self.net(**batch)
        return self.outputs.loss


class First(Model):
    def training_step(self, batch):
        return self.net(**batch)[0]


class Written(Model):
    def training_step(self, batch):
        outputs = self.net(**batch)
        outputs.loss = 2 * outputs.loss
        return outputs.loss


class Aliased(Model):
    def training_step(self, batch):
        net = self.net
        return net(**batch).loss


class AliasedBefore(Chained):
    def __init__(self, net=None):
        super().__init__(net)
        self.student = self.net


class AliasedArgument(LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net
        self.distilled = [net]

    def training_step(self, batch):
        return self.net(**batch).loss


class GivenAway(Chained):
    def on_fit_start(self):
        self.helper = helper(self, None)


class ByMethod(Model):
    def training_step(self, batch):
        return self.net.losses(batch).loss


class ByName(Model):
    def training_step(self, batch):
        return getattr(self, "net")(**batch).loss + self.net(**batch).loss  # noqa: B009


class ByTrainer(Chained):
    def more(self, batch):
        return self.trainer.lightning_module.net(**batch).logits


class ByChildren(Chained):
    def more(self, batch):
        return [child(**batch).logits for child in self.children()]


class Extends(Logits):
    def training_step(self, batch):
        return super().training_step(batch) + self.net(**batch).loss


class Outside(Model):
    def training_step(self, batch):
        return helper(self, batch) + self.net(**batch).loss


class Mixin:
    def log_accuracy(self, batch):
        return self.net(**batch).logits.mean()


class MixedBefore(Mixin, Chained):
    pass


class MixedAfter(Chained, Mixin):
    pass


class Elsewhere(Chained):
    def predict_logits(self, batch):
        return self.net(**batch).logits


class Evaluates(Chained):
    def more(self, batch):
        return self.validation_step(batch)


class Forwards(Chained):
    def forward(self, **batch):
        return self.net(**batch)


def doubled(step):
    @functools.wraps(step)
    def double(self, batch):
        return step(self, batch) + self.net(**batch).logits.sum()

    return double


class Decorated(Model):
    @doubled
    def training_step(self, batch):
        return self.net(**batch).loss


class Exchanged(Model):
    training_step = doubled(Chained.training_step)


def replaced():
    model = Chained()
    model.training_step = lambda batch: model.net(**batch).logits
    return model


def helper(model, batch):
    return model.net(**batch).logits.sum()


USES = [Logits, Passed, Returned, Kept, First, Written, Aliased, AliasedBefore, AliasedArgument, GivenAway, ByMethod]
USES += [ByName, ByTrainer, ByChildren, Extends, Outside, MixedBefore, MixedAfter, Elsewhere, Evaluates, Forwards]
USES += [Decorated, Exchanged, replaced]


@pytest.mark.parametrize("kind", USES)
def test_more_than_the_loss_may_be_used(kind):
    assert not uses_only_loss(kind(), "net")


def test_without_source_nothing_is_certain():
    names = {"LightningModule": LightningModule}
    exec(
        "class Made(LightningModule):\n    def training_step(self, batch):\n        return self.net(**batch).loss",
        names,
    )
    assert not uses_only_loss(names["Made"](), "net")


def test_source_of_another_class_says_nothing():
    def training_step(self, batch):
        return self.net(**batch).logits.sum()

    training_step.__code__ = training_step.__code__.replace(
        co_firstlineno=Chained.training_step.__code__.co_firstlineno
    )
    assert not uses_only_loss(type("Other", (Model,), {"training_step": training_step})(), "net")


class Step(LightningModule):
    """Has what a step may use."""

    size = 3

    def __init__(self):
        super().__init__()
        self.net, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
        self.rate, self.kept, self.last, self.helper = 0.5, [], None, SimpleNamespace(rate=2)

    def forward(self, x):
        return self.net(x)

    def loss(self, x):
        return self.net(x).square().mean()

    @property
    def half(self):
        return self.rate / 2


def plus_one(x):
    return x + 1


def times_item(x):
    return x * x.max().item()


LIMITS = [1, 2]


class Fits(Step):
    def training_step(self, batch, index):
        x, y = batch
        outputs = [plus_one(layer(x)) for layer in self.layers]
        total = torch.stack(outputs).sum() * self.half * self.size + functional.mse_loss(self(x), y)
        total += self.loss(x) if index % 2 else math.sqrt(2.0)
        outputs[0] = total
        with torch.no_grad():
            self.log("loss", total.detach())
        self.last = total.detach()
        return {"loss": total, "outputs": outputs}


class NoStep(Step):
    pass


class Fetching(Step):
    def training_step(self, batch, index):
        return times_item(self.loss(batch))


class Writing(Step):
    def training_step(self, batch, index):
        self.net.weight[0] = 0
        return self.loss(batch)


class Counting(Step):
    def training_step(self, batch, index):
        self.rate += 1
        return self.loss(batch)


class Numbering(Step):
    def training_step(self, batch, index):
        self.rate = index
        return self.loss(batch)


class InPlace(Step):
    def training_step(self, batch, index):
        self.net.weight.mul_(2)
        return self.loss(batch)


class Seeded(Step):
    def training_step(self, batch, index):
        return self.loss(batch) * random.random()


class OfNumpy(Step):
    def training_step(self, batch, index):
        return self.loss(batch) * np.random.rand()


class Gathers(Step):
    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.kept.append(loss)
        return loss


class Helped(Step):
    def training_step(self, batch, index):
        return self.loss(batch) * self.helper.rate


class OfState(Step):
    def training_step(self, batch, index):
        return self.loss(batch) * LIMITS[0]


class Handed(Step):
    def training_step(self, batch, index):
        return plus_one(self)


class Nested(Step):
    def training_step(self, batch, index):
        def loss(x):
            return self.loss(x)

        return loss(batch)


class OfTrainer(Step):
    def training_step(self, batch, index):
        return self.loss(batch) / self.trainer.world_size


class Unreadable(Step):
    exec("def training_step(self, batch, index):\n    return self.loss(batch)")


class Made(Step):
    training_step = functools.partialmethod(Step.loss)


class Imports(Step):
    def training_step(self, batch, index):
        from collections import OrderedDict

        return OrderedDict(loss=self.loss(batch))


def odeint(x):
    return torch.autograd.grad(x.sum(), x)[0]


odeint.__module__ = "solvers"


class OfAnotherPackage(Step):
    def training_step(self, batch, index):
        return odeint(self.loss(batch))


class Twice(torch.autograd.Function):
    pass


class OfOperator(Step):
    def training_step(self, batch, index):
        return Twice.apply(self.loss(batch))


REASONS = {
    Fetching: "times_item uses item",
    Writing: "writes to self.net.weight[0]",
    Counting: "writes to self.rate",
    Numbering: "writes to self.rate",
    InPlace: "writes in place, by mul_",
    Seeded: "uses random",
    OfNumpy: "uses random",
    Gathers: "uses self.kept, a list",
    Helped: "uses self.helper, a SimpleNamespace",
    OfState: "uses LIMITS",
    Handed: "passes the module on as a whole",
    Nested: "has a functiondef",
    OfTrainer: "uses trainer",
    Unreadable: "cannot be read",
    Made: "no plain method",
    NoStep: "no plain method",
    Imports: "uses OrderedDict",
    OfAnotherPackage: "calls odeint, which uses autograd",
    OfOperator: "uses apply",
}


def test_a_plain_step_fits():
    assert unfit_for_compiling(Fits()) is None


@pytest.mark.parametrize("kind", REASONS)
def test_what_stands_in_the_way_of_compiling_is_said(kind):
    assert REASONS[kind] in unfit_for_compiling(kind())


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.1), nn.RReLU(), nn.Sequential(nn.Dropout(0.1))]
)
def test_a_module_that_draws_stands_in_the_way(layer):
    module = Fits()
    module.net = layer
    assert "draws random numbers" in unfit_for_compiling(module)
