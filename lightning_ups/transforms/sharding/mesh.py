"""The device mesh (replicas, shards, tensor parallelism), and the part of a tensor that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement

from lightning_ups._compat.torch.fsdp.state import flattened
from lightning_ups._compat.torch.tensors.tensors import forget_meshes

DATA, TENSOR, PIPELINE = "data_parallel", "tensor_parallel", "pipeline_parallel"  # the first two are Lightning's
_REPLICATE, _SHARD = "replicate", "shard"


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The sizes of the mesh dimensions. Adjacent ranks split matrices first, then parameters.

    Args:
        replicate: Number of replicas of the sharded model.
        shard: Number of devices over which each replica is sharded.
        tensor: Number of devices over which each matrix product is split.
        pipeline: Number of devices over which the blocks are divided.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int = 1

    @classmethod
    def of(cls, num_devices: int, *, replicate: int | None = 1, tensor: int = 1, pipeline: int = 1) -> Self:
        """Divide ``num_devices``; by default all of them shard. With ``replicate=None`` none do.

        Raises:
            ValueError: If the sizes do not divide the number of devices.
        """
        wanted = tensor * pipeline * (replicate or 1)
        if tensor < 1 or wanted < 1 or num_devices % wanted:
            stages = f" times pipeline_parallel_size={pipeline}" if pipeline > 1 else ""
            raise ValueError(
                f"{num_devices} devices cannot be divided by tensor_parallel_size={tensor}{stages} times"
                f" replicate_size={replicate or 1}. Choose sizes whose product divides {num_devices}."
            )
        if replicate is None:
            return cls(replicate=num_devices // wanted, shard=1, tensor=tensor, pipeline=pipeline)
        return cls(replicate=replicate, shard=num_devices // wanted, tensor=tensor, pipeline=pipeline)


# Each mesh has process groups, and each NCCL group has buffers on the device and connections to all other ranks: a
# script that fits, tests and fits again needs them once. And torch compares meshes of DTensors by value: if two meshes
# are equal, one graph may use the groups of both, and its collectives are not combined.
_MESHES: dict[tuple[str, MeshSizes], tuple[Any, DeviceMesh]] = {}


def build_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """Return a mesh with dimensions ``data_parallel`` and ``tensor_parallel``, shared by all runs of the process.

    With stages of a pipeline, ``pipeline_parallel`` comes before them.
    """
    forget_meshes()
    world, earlier = _MESHES.get((device_type, sizes), (None, None))
    if earlier is not None and world is dist.group.WORLD:
        return earlier
    mesh = _new_mesh(device_type, sizes)
    _MESHES[device_type, sizes] = dist.group.WORLD, mesh  # initialized by now
    return mesh


def _new_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    shape, names = (sizes.shard, sizes.tensor), (DATA, TENSOR)
    if sizes.replicate > 1:
        shape, names = (sizes.replicate, *shape), (_REPLICATE, _SHARD, TENSOR)
    if sizes.pipeline > 1:
        shape, names = (sizes.pipeline, *shape), (PIPELINE, *names)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if sizes.replicate > 1:
        flattened(mesh, (_REPLICATE, _SHARD), DATA)
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of ``mesh`` that FSDP2 shards over: one dimension, or a replica dimension and it."""
    if _REPLICATE in (mesh.mesh_dim_names or ()):
        return mesh[_REPLICATE, _SHARD]
    return mesh[DATA]


def num_shares(mesh: DeviceMesh) -> int:
    """Return the number of parts into which ``mesh``, a `data_mesh`, splits a parameter."""
    return mesh.size(mesh.ndim - 1)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def least_of_ranks(*sizes: int, device: torch.device) -> list[int]:
    """Return the minimum of each of ``sizes`` across ranks, so that all ranks decide alike. A collective."""
    least = torch.tensor(sizes, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.tolist()


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """Return the part of ``whole`` that this rank holds when it is sharded like ``like``, as a view if possible."""
    return part_of(whole, like.device_mesh, like.placements)


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return the part of ``whole`` that this rank holds under ``placements`` on ``mesh``, as a view if possible."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # The last dimension of the mesh splits first: tensor parallelism comes before FSDP2, which splits the rest.
    for dim in reversed(range(mesh.ndim)):
        placement = placements[dim]
        axis = getattr(placement, "dim", None)  # shards, strided or not, have it
        if axis is not None:
            parts = torch.chunk(whole, mesh.size(dim), dim=axis)
            place = coordinate[dim]
            whole = parts[place] if place < len(parts) else whole.narrow(axis, 0, 0)
    return whole


@torch.no_grad()
def shard_alike(copy: nn.Module, model: nn.Module) -> None:
    """Replace each unsharded parameter of ``copy`` by its shard, placed as that of ``model``.

    Raises:
        ValueError: If the two do not have the same parameters.
    """
    shards = dict(model.named_parameters(remove_duplicate=False))
    copies = dict(copy.named_parameters(remove_duplicate=False))
    if shards.keys() != copies.keys():
        raise ValueError(
            f"A callback copied {type(model).__name__} before it was complete:"
            f" {', '.join(sorted(shards.keys() ^ copies.keys())[:4])} differ."
            " Create all submodules in __init__, or remove the callback."
        )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in copies.items():
        like = shards[name]
        if isinstance(parameter, DTensor) or not isinstance(like, DTensor):
            continue
        if parameter not in made:
            part = local_part(parameter.detach().to(like.to_local().device), like).clone()
            shape = {"shape": like.shape, "stride": like.stride()}
            shard = DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **shape)
            made[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        copy.get_submodule(owner).register_parameter(last, made[parameter])


def unsharded(model: nn.Module) -> list[str]:
    """Return the names of trainable parameters that are not sharded."""
    return [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
