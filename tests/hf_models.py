"""Tiny models of transformers, and batches for them."""

import torch

from lightning_ups.data.packed_tokens import PackedBatch
from lightning_ups.kernels.attention import Documents

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WINDOW = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
LLAMA4 = {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4, "intermediate_size_mlp": 48}
MORE = {
    "cohere": {},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 2, **LATENT},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **GPT2},
    "granite": {"logits_scaling": 2.0},
    "llama": {},
    "llama4_text": LLAMA4,
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 2, "output_router_logits": True},
    "qwen3": {"head_dim": 8},
    # With a state, or with masks of their own.
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"rotary_dim": 4, **GPT2},
    "mamba": {},
}


def config(kind="llama", **changed):
    """Return the content of a ``config.json``."""
    return {"model_type": kind, **SHAPE, **MORE[kind], **changed}


def pretrained(path, kind="llama", **changed):
    """Save a model with random weights, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(kind, **changed))).save_pretrained(path)
    return str(path)


def packed(*rows):
    """Return a batch with documents of these lengths in each row, and the documents as (tokens, targets)."""
    torch.manual_seed(0)
    shape = len(rows), sum(rows[0])
    tokens, targets = torch.randint(64, shape), torch.randint(64, shape)
    positions = torch.cat([torch.arange(length) for row in rows for length in row]).view(shape)
    ends = torch.tensor([0, *(length for row in rows for length in row)]).cumsum(0)
    batch = PackedBatch(tokens, targets, positions, Documents.from_cu_seqlens(ends, batch=shape[0], seq=shape[1]))
    cuts = ends[1:-1]
    return batch, [*zip(tokens.flatten().tensor_split(cuts), targets.flatten().tensor_split(cuts), strict=True)]


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", "vocab_size": 80, "max_position_embeddings": 64, **SMALL, **NO_DROPOUT}
VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, **SMALL, **NO_DROPOUT}
T5 = {
    "model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
