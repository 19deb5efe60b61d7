"""Export of adapters by PEFT's own functions: merged into the weights, or kept apart from them."""

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.packages import require
from lightning_ups.models.hf.four_bit import full_weights

_NOT_MERGED = ("use_dora", "lora_bias", "target_parameters", "trainable_token_indices")
_NO_IMPORTS = ("megatron_config", "megatron_core")  # names a module that PEFT would import
_KINDS = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA", "OFT")  # that read no file, and learn no prompt
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # of LoRA, that leave the weights below as they are


def write(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    architecture: str,
    adapters: Mapping[str, Mapping[str, Any]],
    output: Path,
    *,
    merge: bool,
    dtype: torch.dtype | None,
    shard: int,
) -> None:
    """Write a model with its adapters merged, or its adapters alone; read it again, and compare it with ``weights``.

    Args:
        weights: By the names of a ``PeftModel``.
        config: Content of the model's ``config.json``.
        architecture: Name of the model's class in transformers.
        adapters: By name, the content of their ``adapter_config.json``.
        output: An empty folder.
        merge: Whether to merge the adapters.
        dtype: To write, or as it is in ``weights``.
        shard: Bytes of one file of a merged model, at most.

    Raises:
        ValueError: If the model cannot be built, or its adapters cannot be written so.
        RuntimeError: If what was written differs from the weights.
    """
    transformers = require("transformers", requirement="transformers>=4.50", extra="hf", feature="export --adapters")
    if not architecture:
        raise ValueError(
            'The model\'s config.json does not name its class. Add it, as in "architectures": ["LlamaForCausalLM"].'
        )
    kind = getattr(transformers, architecture, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"{architecture} is not a model of transformers. --adapters builds no other.")
    peft = require("peft", requirement="peft>=0.14", extra="hf", feature="export --adapters")
    weights = full_weights(weights)
    configs = {}
    for name, adapter in adapters.items():
        if adapter.get("peft_type") not in _KINDS:
            raise ValueError(f"--adapters writes {', '.join(_KINDS)}, and {name} is {adapter.get('peft_type')}.")
        given = {option: value for option, value in adapter.items() if option not in _NO_IMPORTS}
        configs[name] = peft.PeftConfig.from_peft_type(**given)
    _check(configs, merge=merge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's calls of transformers
        model = _built(peft, kind, config, configs, weights)
        pairs = _merged(model, weights, dtype, output, shard) if merge else _kept(peft, model, weights, dtype, output)
        for name, found, expected in pairs:
            if found is None or found.shape != expected.shape or not torch.equal(found.to(expected.dtype), expected):
                raise RuntimeError(
                    f"{name} in {output} differs from the checkpoint. Check the disk, and use another folder."
                )


def _check(configs: Mapping[str, Any], *, merge: bool) -> None:
    """Raise if ``configs`` are of a kind whose result cannot be compared."""
    for name, config in configs.items():
        kind, start = config.peft_type.value, getattr(config, "init_lora_weights", None)
        if merge and (kind != "LORA" or len(configs) > 1 or any(getattr(config, each, None) for each in _NOT_MERGED)):
            raise ValueError(
                f"--adapters merge cannot merge {', '.join(configs)} ({kind})."
                f" It merges one LoRA, without {', '.join(_NOT_MERGED)}. Use --adapters keep."
            )
        if not merge and start not in _STARTS:
            raise ValueError(
                f"--adapters keep cannot write {name}: init_lora_weights={start!r} has changed the weights that it is"
                " added to. Use --adapters merge."
            )


def _built(
    peft: Any, kind: Any, config: Mapping[str, Any], adapters: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Any:
    """Return the ``PeftModel`` of ``weights``."""
    starts = {name: getattr(adapter, "init_lora_weights", None) for name, adapter in adapters.items()}
    with torch.device("meta"):
        base, model = kind(kind.config_class.from_dict(dict(config))), None
        for name, adapter in adapters.items():
            adapter.base_model_name_or_path = base.name_or_path = adapter.base_model_name_or_path or None
            if starts[name] is not None:
                adapter.init_lora_weights = True  # others are computed from weights
            if model is None:
                model = peft.get_peft_model(base, adapter, adapter_name=name, autocast_adapter_dtype=False)
            else:
                model.add_adapter(name, adapter)
            if starts[name] is not None:
                adapter.init_lora_weights = starts[name]
    assert model is not None
    unknown = model.load_state_dict(dict(weights), strict=False, assign=True).unexpected_keys
    base.tie_weights()
    lacking = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if unknown or lacking:
        raise ValueError(
            f"The configs do not fit the weights, which lack {lacking[:3]} and have unknown {unknown[:3]}."
            " Give those that the model was built with."
        )
    return model


def _merged(
    model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype | None, output: Path, shard: int
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Write the merged model; yield the name of each tensor, what was read again, and W + scale * B @ A."""
    (adapter,) = model.peft_config
    base = model.get_base_model()
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    places = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if name in weights}
    merged = model.merge_and_unload(safe_merge=True)
    names = {name: places[id(tensor)] for name, tensor in merged.state_dict(keep_vars=True).items()}
    if dtype is not None:
        merged.to(dtype)
    merged.save_pretrained(output, max_shard_size=shard)
    read, found = type(merged).from_pretrained(output, output_loading_info=True)
    if wrong := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
        raise RuntimeError(f"{output} lacks or has unknown {wrong[:3]}. Check the disk, and do not use this folder.")
    state = read.state_dict()
    for name, place in names.items():
        weight, (module, _, end) = weights[place], name.rpartition(".")
        if end == "weight" and module in layers:
            weight = weight + layers[module].get_delta_weight(adapter).to(weight.dtype)
        yield name, state.get(name), _cast(weight, dtype)


def _kept(
    peft: Any, model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype | None, output: Path
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Write the adapters; yield the name of each tensor, what it is with the adapters read again, and what it was."""
    if dtype is not None:
        model.to(dtype)
    names, adapters = [name for name in model.state_dict() if name in weights], [*model.peft_config]
    base = model.get_base_model().name_or_path
    # "auto" compares the sizes of vocabularies, and would ask the Hub for a base that is not a folder.
    model.save_pretrained(output, save_embedding_layers="auto" if not base or os.path.isdir(base) else False)
    read, model = None, model.unload()
    for adapter in adapters:
        folder = output if adapter == "default" else output / adapter
        options = {"adapter_name": adapter, "torch_device": "cpu"}  # float32 adapters on weights of half precision
        if read is None:
            read = peft.PeftModel.from_pretrained(model, folder, **options)
        else:
            read.load_adapter(folder, **options)
    assert read is not None
    state = read.state_dict()
    for name in names:
        if ".original_module." not in name:  # unload() leaves what was trained in its place
            yield name, state.get(name), _cast(weights[name], dtype)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
