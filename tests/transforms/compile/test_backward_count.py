import functools
import types

import pytest
import torch
from torch import nn

from lightning_ups.transforms.compile.backward_count import repeated_backward


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
