"""Describes the models in a checkpoint, so that it can be exported without the code that built them."""

import json
from dataclasses import asdict, is_dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups.transforms.kv_cache import kv_cache_as_before

__all__ = ["MODELS", "described"]

MODELS = "lightning_ups.models"  # the key in a checkpoint


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
