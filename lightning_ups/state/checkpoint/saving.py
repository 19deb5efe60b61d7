"""Saves a Lightning checkpoint as a folder, in which DCP stores the tensors; or gathered on rank 0, as one file."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups.state.checkpoint import meta
from lightning_ups.state.checkpoint.loading import APART, EXTRA, PLACES, SHARDED, lifted
from lightning_ups.state.checkpoint.saver import Saver
from lightning_ups.state.checkpoint.state import FOREIGN

__all__ = ["gathered", "numbered", "save_sharded", "save_whole"]


def save_sharded(saver: Saver, checkpoint: dict[str, Any], path: Path, *, apart: tuple[str, ...] = ()) -> None:
    """Save ``checkpoint`` as a folder; every rank writes its part of the tensors.

    Args:
        saver: Writes it, synchronously or in the background.
        checkpoint: The checkpoint, with DTensors under ``state_dict`` and, by parameter names, ``optimizer_states``.
        path: The path of the folder.
        apart: Keys that are not needed to resume, and may have any class.
    """
    rest = dict(checkpoint)
    weights = rest.pop("state_dict")
    state: dict[str, Any] = {"state_dict": {name: value for name, value in weights.items() if _is_tensor(value)}}
    if extra := {name: value for name, value in weights.items() if not _is_tensor(value)}:
        rest[EXTRA] = extra
    state |= {f"optimizer_{index}": tree for index, tree in enumerate(rest.pop("optimizer_states", []))}
    rest, sharded = lifted(rest)
    if sharded:
        state[SHARDED] = sharded
    files: dict[str, bytes] = {}
    if _is_first():
        kept_apart = {key: rest.pop(key) for key in apart if key in rest}
        files = {"meta.pt": meta.dumped(rest)} | ({APART: meta.dumped(kept_apart)} if kept_apart else {})
    facts = {key: rest[key] for key in ("epoch", "global_step") if key in rest}
    saver.save(state, files=files, path=path, facts=facts)


def save_whole(
    saver: Saver, checkpoint: dict[str, Any], path: Path, *, module: nn.Module, were_sharded: Iterable[Tensor] = ()
) -> None:
    """Save ``checkpoint``, with gathered weights and optimizer states, as one file that rank 0 writes.

    Args:
        saver: Writes it.
        checkpoint: The checkpoint. DTensors in the rest of it are gathered, and their places are stored.
        path: The path of the file.
        module: The module of the weights. If it is not sharded, the places of DTensors are unknown.
        were_sharded: Tensors of the checkpoint that were already gathered, wherever they are in it.
    """
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    sharded = lifted(rest, also=were_sharded)[1]
    places = {PLACES: [*sharded]} if any(isinstance(p, DTensor) for p in module.parameters()) else {}
    saver.save_file({**gathered(checkpoint), **places}, path)


@torch.no_grad()
def gathered(tree: Any) -> Any:
    """Return ``tree`` with every DTensor gathered to the host of rank 0, one at a time; None on other ranks.

    A collective.
    """
    if isinstance(tree, DTensor):
        whole = tree.full_tensor()
        return whole.cpu() if _is_first() else None
    if isinstance(tree, Tensor):
        return tree.detach().cpu() if _is_first() else None
    if isinstance(tree, dict):
        return {key: gathered(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(gathered(value) for value in tree)
    return tree


def numbered(tree: dict[str, Any]) -> dict[str, Any]:
    """Return named optimizer state with the indices of a single device, for ``Optimizer.load_state_dict``."""
    if FOREIGN in tree:
        return tree[FOREIGN]
    names = [name for group in tree["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in tree["param_groups"]]
    return {"state": dict(_renamed(tree["state"], numbers)), "param_groups": groups}


def _renamed(state: dict[str, Any], numbers: dict[str, int]) -> Iterator[tuple[int, Any]]:
    yield from sorted((numbers[name], entries) for name, entries in state.items())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
