"""Optimizer states of a pipeline: each rank has the parameters of its stages, and checkpoints those of all."""

from collections.abc import Container
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_ups.state.checkpoint.state import FOREIGN
from lightning_ups.transforms.pipeline import cut_of


def names_of_all_stages(
    module: nn.Module, groups: list[list[str]], process_group: dist.ProcessGroup | None
) -> list[list[str]]:
    """Return the names in each group of an optimizer, those of other ranks among them, in the order of the model.

    A collective, if ``module`` is cut into stages.

    Raises:
        ValueError: If ranks have different numbers of groups.
    """
    cut = cut_of(module)
    if cut is None:
        return groups
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, groups, group=process_group)
    if len({len(each) for each in found}) > 1:
        raise ValueError(
            f"configure_optimizers made {' and '.join(str(len(each)) for each in found)} groups on the stages of the"
            " pipeline, and a checkpoint needs the same on all. Make each group on every rank, also if it is empty."
        )
    order = {name: place for place, name in enumerate(cut.homes)}
    return [sorted({*names}.union(*more), key=order.__getitem__) for names, *more in zip(*found, strict=True)]


def with_all_stages(module: nn.Module, tree: dict[str, Any], process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return ``tree``, an optimizer state by names, with the names of all stages in its groups. A collective.

    Raises:
        ValueError: If the state of the optimizer has another layout than torch's.
    """
    if cut_of(module) is None:
        return tree
    if tree.keys() != {"state", "param_groups"}:
        raise ValueError(
            "This optimizer keeps a state that cannot be saved by the stages of a pipeline. Use an optimizer of"
            " torch.optim whose state has one tensor for each parameter, such as AdamW."
        )
    names = names_of_all_stages(module, [group["params"] for group in tree["param_groups"]], process_group)
    groups = [{**group, "params": its} for group, its in zip(tree["param_groups"], names, strict=True)]
    return {**tree, "param_groups": groups}


def without(tree: dict[str, Any], absent: Container[str]) -> dict[str, Any]:
    """Return ``tree``, an optimizer state by names, without the parameters that other ranks have."""
    if not absent or FOREIGN in tree:
        return tree
    groups = [{**g, "params": [name for name in g["params"] if name not in absent]} for g in tree["param_groups"]]
    state = {name: entries for name, entries in tree.get("state", {}).items() if name not in absent}
    return {**tree, "state": state, "param_groups": groups}
