"""Shards a copy of a model, such as an average of its weights, like the model."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups.transforms.sharding import local_part

__all__ = ["shard_alike"]


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
            f"A callback's copy of {type(model).__name__} has other parameters than the model:"
            f" {', '.join(sorted(shards.keys() ^ copies.keys())[:4])}."
            " It was created before the module was complete, so its averages would be wrong."
            " Create all submodules in __init__, or remove the callback."
        )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in copies.items():
        like = shards[name]
        if isinstance(parameter, DTensor) or not isinstance(like, DTensor):
            continue
        if parameter not in made:
            part = local_part(parameter.detach().to(like.to_local().device), like).clone()
            made[parameter] = nn.Parameter(_as(part, like), requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        copy.get_submodule(owner).register_parameter(last, made[parameter])


def _as(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
