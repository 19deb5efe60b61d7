import torch
from torch import nn

from lightning_ups._compat.tensors import count_writes


def test_writes_in_place_are_counted_and_those_through_data_are_not():
    parameter = nn.Parameter(torch.zeros(2))
    before = count_writes(parameter)
    with torch.no_grad():
        parameter.fill_(1.0)
    assert count_writes(parameter) > before
    before = count_writes(parameter)
    parameter.data.fill_(2.0)
    assert count_writes(parameter) == before
