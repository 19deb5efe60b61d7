"""Saves a Lightning checkpoint as a folder, in which DCP stores the tensors; or gathered on rank 0, as one file."""

import json
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_ups.state.checkpoint import meta
from lightning_ups.state.checkpoint.loading import APART, EXTRA, PLACES, SHARDED, lifted
from lightning_ups.state.checkpoint.saver import Saver
from lightning_ups.state.checkpoint.state import FOREIGN
from lightning_ups.transforms.kv_cache import kv_cache_as_before

MODELS = "lightning_ups.models"  # the key in a checkpoint of what `described` returns


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
    state: dict[str, Any] = {
        "state_dict": {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    }
    if extra := {name: value for name, value in weights.items() if not isinstance(value, Tensor)}:
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
    state = {numbers[name]: tree["state"][name] for name in sorted(tree["state"], key=numbers.__getitem__)}
    return {"state": state, "param_groups": groups}


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def described(module: nn.Module) -> dict[str, dict[str, str]]:
    """Return, by name, each outermost submodule that has a ``config``: its class, and the config as JSON.

    A config counts if it can write itself as JSON, as those of transformers, or is a dataclass of plain values.
    A model with adapters of PEFT is described as the one they were added to, with the configs of all adapters.
    """
    with kv_cache_as_before(module):  # temporary changes by a run are not saved
        return _described(module)


def _described(module: nn.Module) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, submodule in module.named_modules():
        if any(name.startswith(outer + ".") if outer else name for outer in found):
            continue
        if (config := _as_json(getattr(submodule, "config", None))) is not None and name:
            # The original name: FSDP2 gives sharded modules another class.
            model = getattr(submodule, "get_base_model", lambda plain=submodule: plain)()
            kind = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
            found[name] = {"class": f"{kind.__module__}.{kind.__qualname__}", "config": config}
            if adapters := getattr(submodule, "peft_config", None):
                plain = {adapter: each.to_dict() for adapter, each in adapters.items()}
                found[name]["adapters"] = json.dumps(plain, default=sorted)  # PEFT keeps names of modules in a set
    return found


def _as_json(config: Any) -> str | None:
    if callable(write := getattr(config, "to_json_string", None)):
        return str(write())
    if is_dataclass(config) and not isinstance(config, type):
        try:
            return json.dumps(asdict(config))
        except TypeError:
            return None
    return None
