"""Conversion of state dicts between a `GPT` and Hugging Face's Llama and Qwen3."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ups.models.gpt import GPTConfig

_MODEL = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_QK_NORM = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_FUSED = "layers.{}.attention.qkv.weight"
_SPLIT = "model.layers.{}.self_attn.{}_proj.weight"


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``: the arguments of ``LlamaConfig`` or ``Qwen3Config``."""
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie,
        "attention_bias": False,
        "bos_token_id": None,  # of a tokenizer that is not known here; the defaults are those of Llama 2's
        "eos_token_id": None,
    }


def to_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of a `GPT` with the names of Hugging Face, without a tied head.

    Raises:
        ValueError: If ``state`` is not that of a GPT of this shape.
    """
    _check(state, {*_names(config), *map(_FUSED.format, range(config.num_layers))}, tied={"head.weight"}, config=config)
    result = {theirs: state[ours] for ours, theirs in _names(config).items()}
    for layer in range(config.num_layers):
        groups = state[_FUSED.format(layer)].unflatten(0, (-1, config.num_groups + 2, config.head_dim))
        parts = groups.split((config.num_groups, 1, 1), dim=1)
        result |= {_SPLIT.format(layer, name): part.flatten(0, 2) for name, part in zip("qkv", parts, strict=True)}
    return result


def from_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return a state dict of Hugging Face with the names of a `GPT`.

    Raises:
        ValueError: If ``state`` is not that of a model of this shape.
    """
    split = {_SPLIT.format(layer, name) for layer in range(config.num_layers) for name in "qkv"}
    _check(state, {*_names(config).values(), *split}, tied={"lm_head.weight"}, config=config)
    result = {ours: state[theirs] for ours, theirs in _names(config).items()}
    for layer in range(config.num_layers):
        parts = (state[_SPLIT.format(layer, name)] for name in "qkv")
        groups = [part.unflatten(0, (config.num_kv_heads, -1, config.head_dim)) for part in parts]
        result[_FUSED.format(layer)] = torch.cat(groups, dim=1).flatten(0, 2)
    return result | ({"head.weight": result["embedding.weight"]} if config.tie else {})


def _names(config: GPTConfig) -> dict[str, str]:
    """Return both names of each weight that is the same tensor in both."""
    model = {ours: theirs for ours, theirs in _MODEL.items() if not (config.tie and ours == "head")}
    block = _BLOCK | (_QK_NORM if config.qk_norm else {})
    for layer in range(config.num_layers):
        model |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in block.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in model.items()}


def _check(state: Mapping[str, Tensor], wanted: set[str], *, tied: set[str], config: GPTConfig) -> None:
    found = set(state) - tied if config.tie else set(state)
    if found != wanted:
        raise ValueError(
            f"The state dict lacks {sorted(wanted - found)[:4]} and has unknown {sorted(found - wanted)[:4]}."
            f" Its names are not those of {config}. Give the complete state dict and the config that it was built with."
        )
