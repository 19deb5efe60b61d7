from contextlib import ExitStack

import torch
from torch import nn

from lightning_ups.transforms.fsdp.collective_order import CollectiveOrder
from lightning_ups.transforms.fsdp.stalls import StallWatch
from lightning_ups.transforms.sharding import StepState


def checksum(calls, *, name="training_step", reduced=()):
    model, undo = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), ExitStack()
    order = CollectiveOrder(model.named_children(), stalls=StallWatch(""), undo=undo)
    x = torch.ones(1, 1)
    model[1](x)  # in no step
    for step in calls:
        with ExitStack() as within:
            order.begin(StepState(name=name), within)
            for index in step:
                model[index](x)
            with torch.no_grad():
                model[0](x)
        order.note_reduction(reduced)
        order.end(StepState(name=name))
    undo.close()
    assert not any(module._forward_pre_hooks for module in model)
    return order.checksum


def test_ranks_that_run_the_same_modules_in_one_order_have_one_checksum():
    assert checksum([[0, 1]]) == checksum([[0, 1, 0]]) == checksum([[0, 1, 1]])  # later calls do not count
    different = [checksum([[0, 1]]), checksum([[1, 0]]), checksum([[0]]), checksum([[0, 1], [0, 1]])]
    assert len({*different}) == len(different)


def test_what_is_reduced_counts_and_evaluation_does_not():
    assert checksum([[0]], reduced=["0.weight"]) != checksum([[0]], reduced=["0.bias"]) != checksum([[0]])
    assert checksum([[0, 1]], name="validation_step") == checksum([[]], name="validation_step") == 0
