from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from lightning_ups._compat.torch.tensors.tensors import arrived, count_writes, local_of, plain_memory, whole_of


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


def parts():
    whole = torch.arange(4.0)
    shard = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    same = [of(whole) is whole for of in (local_of, whole_of)]
    return local_of(shard).tolist(), whole_of(shard).tolist(), same, local_of(None)


def test_a_sharded_tensor_is_its_part_or_gathered_and_another_is_itself(ranks):
    assert ranks(parts) == ([0, 1], [0, 1, 2, 3], [True, True], None)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def gradient_of_what_waits():
    shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    waits = shard.redistribute(placements=[Replicate()], async_op=True).to_local()
    other = torch.ones(2)
    (x, (y, same)) = arrived((waits, (waits, other)))
    for held in ([waits], {"x": waits}, Pair(waits, other), ([waits],)):
        (inner, *_) = tree_leaves(arrived(held))
        assert type(inner) is torch.Tensor
        assert inner.requires_grad
    torch.compile(lambda x, y: (x * y).sum(), backend="aot_eager", fullgraph=True)(x, y).backward()
    return type(waits).__name__, type(x).__name__, x.tolist(), shard.grad.full_tensor().tolist(), same is other


def test_what_a_collective_brings_has_its_gradient_in_compiled_code(ranks):
    names = "AsyncCollectiveTensor", "Tensor"
    assert ranks(gradient_of_what_waits) == (*names, [0, 1, 2, 3], [0, 2, 4, 6], True)


def test_what_waits_for_nothing_is_itself():
    for value in (torch.ones(2), (torch.ones(2), ([],)), [torch.ones(2)], {"x": [torch.ones(2)]}, None):
        assert arrived(value) is value
