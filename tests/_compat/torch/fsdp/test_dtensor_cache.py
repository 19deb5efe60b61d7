import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_ups._compat.torch.fsdp.dtensor_cache import forget_meshes


def told_meshes():
    told = []
    for forget in (False, False, True):
        if forget:
            forget_meshes()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("told",))
        made = distribute_tensor(torch.randn(4), mesh, [Shard(0)])
        told.append((made.detach().device_mesh is mesh, (made + 1).device_mesh is mesh))
    dist.barrier()
    return told


def test_without_it_a_mesh_is_taken_for_an_equal_one(ranks):
    assert ranks(told_meshes) == [(True, True), (False, False), (True, True)]
