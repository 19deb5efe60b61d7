import pytest
import torch
from torch import nn

from lightning_ups._compat.tensors import count_writes, plain_memory


def test_writes_in_place_are_counted_and_those_through_data_are_not():
    parameter = nn.Parameter(torch.zeros(2))
    before = count_writes(parameter)
    with torch.no_grad():
        parameter.fill_(1.0)
    assert count_writes(parameter) > before
    before = count_writes(parameter)
    parameter.data.fill_(2.0)
    assert count_writes(parameter) == before


def test_a_weight_that_is_gathered_in_float8_is_the_memory_that_it_wraps():
    torchao = pytest.importorskip("torchao.float8.fsdp_utils")
    plain = torch.randn(4, 4)
    wrapped = torchao.WeightWithDynamicFloat8CastTensor(plain, None, torch.float8_e4m3fn)
    assert plain_memory(wrapped) is plain
    assert plain_memory(plain) is plain
    assert plain_memory(None) is None
