from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_ups.transforms.sharding.mesh import (
    MeshSizes,
    build_mesh,
    data_mesh,
    device_of,
    least_of_ranks,
    part_of,
    shard_alike,
)
from tests.strategies.cases import two_ranks


def test_whatever_is_not_asked_for_otherwise_shards():
    assert MeshSizes.of(8) == MeshSizes(replicate=1, shard=8, tensor=1)
    assert MeshSizes.of(8, replicate=2, tensor=2) == MeshSizes(replicate=2, shard=2, tensor=2)
    assert MeshSizes.of(8, replicate=None, tensor=2) == MeshSizes(replicate=4, shard=1, tensor=2)


@pytest.mark.parametrize(("replicate", "tensor"), [(3, 1), (1, 3), (4, 4), (1, 0), (-1, 1)])
def test_what_does_not_divide_is_refused(replicate, tensor):
    with pytest.raises(ValueError, match=r"8 devices cannot be divided.*Choose sizes whose product divides 8"):
        MeshSizes.of(8, replicate=replicate, tensor=tensor)


def layout(replicate):
    mesh = build_mesh("cpu", MeshSizes.of(4, replicate=replicate, tensor=2))
    return (
        mesh.mesh_dim_names,
        data_mesh(mesh).mesh_dim_names,
        mesh["data_parallel"].mesh.tolist(),
        mesh["tensor_parallel"].mesh.tolist(),
    )


def test_neighbours_split_matrices_and_the_data_dimension_has_one_name(four_ranks):
    assert four_ranks(layout, 1) == (("data_parallel", "tensor_parallel"), ("data_parallel",), [0, 2], [0, 1])
    names, sharded, data, tensor = four_ranks(layout, 2)
    assert names == ("replicate", "shard", "tensor_parallel")
    assert sharded == ("replicate", "shard")
    assert (data, tensor) == ([0, 2], [0, 1])


@two_ranks
def test_all_runs_of_a_process_share_a_mesh_and_its_groups():
    sizes, others = MeshSizes.of(2), MeshSizes.of(2, tensor=2)
    first, other = build_mesh("cpu", sizes), build_mesh("cpu", others)
    groups = len(dist.distributed_c10d._world.pg_map)
    assert build_mesh("cpu", sizes) is first is not other
    assert len(dist.distributed_c10d._world.pg_map) == groups


@two_ranks
def test_what_torch_knows_of_an_equal_mesh_is_forgotten():
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    (distribute_tensor(torch.randn(8), other, [Shard(0), Replicate()]).detach() * 2).to(torch.bfloat16)
    mesh = build_mesh("cpu", MeshSizes.of(2))
    assert mesh == other
    assert mesh is not other
    made = distribute_tensor(torch.randn(8), mesh, [Shard(0), Replicate()])
    for each in (made, made.detach(), made * 2, made.to(torch.bfloat16)):
        assert each.device_mesh is mesh


def test_a_mesh_of_another_world_is_left(tmp_path):
    meshes = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / str(number)}", rank=0, world_size=1)
        meshes.append(build_mesh("cpu", MeshSizes.of(1)))
        dist.destroy_process_group()
    assert meshes[0] is not meshes[1]


@two_ranks
def test_a_part_is_what_a_distributed_tensor_keeps():
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(15.0).view(3, 5)
    for p in (Shard(0), Shard(1), Replicate()):
        assert torch.equal(part_of(whole, mesh, [p]), distribute_tensor(whole, mesh, [p]).to_local())
    assert part_of(torch.ones(1), mesh, [Shard(0)]).numel() == (mesh.get_local_rank() == 0)
    assert device_of(mesh) == torch.device("cpu")


@two_ranks
def test_ranks_decide_by_the_one_that_has_least():
    rank = dist.get_rank()
    assert least_of_ranks(2**40 + rank, 7 - rank, device=torch.device("cpu")) == [2**40, 6]


@two_ranks
def test_a_copy_keeps_its_values_as_shards():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model[1].weight = nn.Parameter(model[0].weight.T.contiguous())
    copy = deepcopy(model)
    expected = [p.detach().clone() for p in copy.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shard_alike(copy, model)
    shard_alike(copy, model)  # a second fit's
    for c, p, right in zip(copy.parameters(), model.parameters(), expected, strict=True):
        assert torch.equal(c.full_tensor(), right)
        assert c.placements == p.placements
        with torch.no_grad():
            c.lerp_(p, 0.5)  # what averaging does


def test_a_copy_of_another_module_is_refused():
    with pytest.raises(ValueError, match=r"before it was complete.*Create all submodules in __init__"):
        shard_alike(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
