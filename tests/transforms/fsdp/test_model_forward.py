import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.state import initialise
from lightning_ups.transforms.fsdp.model_forward import ModelForward
from tests.transforms.fsdp.test_sharding import sharded_model


def gathered():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.own = nn.Parameter(torch.ones(4))
    root = sharded_model(model).root
    initialise(root)
    forward, seen = ModelForward(root), []

    def look():
        seen.append((forward.is_gathered, not isinstance(model.own, DTensor)))

    for has_backward in (True, False, True):
        forward.begin(shows_gradients=False)
        look()
        loss = (model.layers[1](model.layers[0](torch.ones(1, 4))) * model.own).sum()
        forward.end()
        forward.end()  # a second one does nothing
        look()
        if has_backward:
            forward.begin_backward(loss)
            loss.backward()
            forward.end_backward()
            look()
    forward.begin(shows_gradients=False)
    forward.settle()
    look()
    return seen


def test_what_the_model_holds_is_gathered_from_its_forward_to_the_end_of_its_backward(ranks):
    with_backward, without = [(True, True), (False, True), (False, False)], [(True, True), (False, True)]
    assert ranks(gathered) == [*with_backward, *without, *with_backward, (False, False)]
