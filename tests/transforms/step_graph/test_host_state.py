import random

import numpy
import pytest
import torch
from torch import nn

from lightning_ups.transforms.step_graph import ConstantIndex, HostState, line_of, names_read, refusing_reads

CUDA = torch.device("cuda")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.inner.total = torch.zeros(())
        self.count, self.rate, self.seen = 0, 0.5, []

    def step(self):
        return self.one() + self.scale

    def one(self):
        return self.trainer.global_step


def moved(model):
    model.inner.total = model.inner.total + 1


CHANGES = {
    "count": lambda model: setattr(model, "count", 1),
    "rate": lambda model: setattr(model, "rate", 0.25),
    "seen": lambda model: model.seen.append(1),
    "inner.total": moved,
    "inner.running_mean": lambda model: setattr(model.inner, "running_mean", torch.zeros(2)),
    "random numbers of Python": lambda model: random.random(),
    "random numbers of numpy": lambda model: numpy.random.rand(),
    "random numbers of torch on the CPU": lambda model: torch.rand(()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_the_host_is_named(name):
    model = Model()
    before = HostState(model, CUDA)
    CHANGES[name](model)
    assert before.changes() == [name]


def test_changes_in_place_are_none():
    model = Model()
    before = HostState(model, CUDA)
    model.inner(torch.ones(3, 2))
    model.inner.total.add_(1)
    assert before.changes() == []
    before = HostState(model, torch.device("cpu"))
    torch.rand(())  # the random numbers of the device
    assert before.changes() == []


@pytest.mark.parametrize("read", [lambda i: i % 2, lambda i: i == 0, lambda i: i < 3, bool, "{}".format, float])
def test_an_index_is_passed_on_and_not_read(read):
    index = ConstantIndex(3)
    assert isinstance(index, int)
    with pytest.raises(RuntimeError, match="batch_idx"):
        read(index)


def test_names_are_found_in_the_methods_that_a_step_names():
    assert names_read(Model(), "step", ("global_step", "current_epoch", "scale")) == ["global_step", "scale"]
    assert names_read(Model(), "missing", ("global_step",)) == []


def test_reading_a_value_is_an_error_with_its_line():
    x = torch.ones(2)
    with refusing_reads():
        x + 1
        with pytest.raises(RuntimeError) as raised:
            x.sum().item()
    assert line_of(raised.value).endswith("x.sum().item(): operation not permitted when stream is capturing")
