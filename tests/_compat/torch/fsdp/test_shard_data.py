import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_ups._compat.torch.fsdp.shard_data import shard_data_written


def written():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    refused = []
    with shard_data_written(), shard_data_written():
        parameter.data = parameter.data * 3
        parameter.data = torch.tensor([[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]])
        others = (
            torch.zeros(2, 2),
            distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()]),
            parameter.detach().double(),
        )
        for values in others:
            with pytest.raises(ValueError, match="distribute_tensor") as error:
                parameter.data = values
            refused.append(str(error.value))
        (parameter * 2).sum().backward()
    return parameter.full_tensor().tolist(), parameter.grad.full_tensor().tolist(), refused


def test_values_that_are_set_are_the_shards(ranks):
    values, gradient, refused = ranks(written)
    assert values == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]
    assert gradient == [[2.0, 2.0]] * 4
    assert ["is not split, of torch.float32 and on cpu." in text for text in refused] == [True, False, False]
    assert "is split as (Replicate(),), of" in refused[1]
    assert "of torch.float64" in refused[2]


ASSIGNED = {
    "a row": (3, 7.0),
    "rows": (slice(1, 3), 7.0),
    "rows by number": ([0, 3], torch.arange(2.0)),
    "a mask": (torch.tensor([True, False, False, True]), 7.0),
    "a column": ((slice(None), 1), 7.0),
    "an element": ((2, 0), 7.0),
}


def assigned(dim):
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for name, (index, values) in ASSIGNED.items():
        expected = torch.arange(8.0).reshape(4, 2)
        parameter = nn.Parameter(distribute_tensor(expected, mesh, [Shard(dim)]))
        memory = parameter._local_tensor.data_ptr()
        expected[index] = values
        with shard_data_written() as reads:
            with torch.no_grad():
                parameter[index] = values
                parameter.data[index] = values
            reads.check()
        if not torch.equal(parameter.full_tensor(), expected) or parameter._local_tensor.data_ptr() != memory:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_assigned_to_an_index_is_kept(ranks, dim):
    assert ranks(assigned, dim) == []


def through_an_index():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    with shard_data_written() as reads, torch.no_grad():
        row = parameter[0]
        parameter[:, 0].zero_()  # not split: a view
        parameter.mul_(1)
        row.sum()
        reads.check()
        parameter[0].fill_(2)
        with pytest.raises(RuntimeError, match=r"shape \(4, 2\).*lost.*weight\[0\] = 0"):
            reads.check()
        reads.check()
        parameter.data[0][1].fill_(2)
        with pytest.raises(RuntimeError, match="would be lost"):
            reads.check()
    with shard_data_written() as others, torch.no_grad():
        parameter[0].fill_(2)
    reads.check()  # another run has nothing to do with it
    with pytest.raises(RuntimeError, match="would be lost"):
        others.check()
    with shard_data_written(), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter[0] = 1
    return parameter.full_tensor().tolist()


def test_a_write_through_an_index_is_kept_where_it_is_a_view_and_refused_elsewhere(ranks):
    assert ranks(through_an_index) == [[0.0, 1.0]] * 4


def compiled():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with shard_data_written():
        return torch.compile(lambda x: x[:, 0] * 2, backend="eager", fullgraph=True)(tensor).full_tensor().tolist()


def test_an_index_within_a_graph_is_torchs_own(ranks):
    assert ranks(compiled) == [2.0] * 4
