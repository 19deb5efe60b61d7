"""Attention of packed documents, for models of Hugging Face's transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.optional.transformers import imported
from lightning_ups.kernels.attention import Documents, attention
from lightning_ups.kernels.attention.masks import dense_mask

NAME = "lightning_ups"  # as a transformers `attn_implementation`
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def use_in(model: Any) -> None:
    """Let ``model`` take ``documents``, where transformers would call torch's attention: other calls stay as they are.

    Args:
        model: A ``PreTrainedModel``.
    """
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        kernels, masks = imported().AttentionInterface, imported().AttentionMaskInterface
        kernels.register(NAME, partial(attend, kernels()["sdpa"]))
        masks.register(NAME, masks()["sdpa"])
        model.set_attn_implementation(NAME)


def packed_inputs(model: Any, positions: Tensor, documents: Documents) -> dict[str, Any]:
    """Return the arguments that let ``model`` see only tokens of the same document.

    Raises:
        ValueError: If ``model`` would mix documents.
    """
    config = model.config.get_text_config()
    layers = {*(getattr(config, "layer_types", None) or ())}
    if not model._supports_attention_backend or model._is_stateful or layers - _LAYERS:
        what = (
            f"layers of {', '.join(sorted(layers - _LAYERS))}" if layers - _LAYERS else "a state, or masks of its own"
        )
        raise ValueError(
            f"{type(model).__name__} would mix the documents of a packed row: it has {what}."
            " Give it batches with one document in a row: dicts of input_ids, labels and attention_mask."
        )
    kernel = model.config._attn_implementation
    if "flash" in kernel and len(positions) > 1:  # of transformers, which then sees each row as one document
        raise ValueError(
            f"{kernel} would mix the documents of packed rows: transformers tells them apart only in a batch of one."
            f" Use batches of one longer row, or leave out options={{'attn_implementation': {kernel!r}}}."
        )
    if kernel != NAME or "chunked_attention" in layers:
        return {"position_ids": positions}  # transformers finds documents where positions start again
    # A mask of four axes is passed on as it is, instead of one that transformers would build.
    return {"position_ids": positions, "documents": documents, "attention_mask": documents.ids[:, None, None]}


def attend(
    sdpa: Callable[..., tuple[Tensor, None]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention as ``sdpa``, of transformers, does; with ``documents``, a token sees only those of its own.

    Raises:
        ValueError: If the model has not passed ``documents`` on.
    """
    if documents is not None:
        if query.shape[-1] == value.shape[-1] and not dropout and options.get("position_bias") is None:
            q, k, v = (heads.transpose(1, 2) for heads in (query, key, value))
            return attention(q, k, v, window=sliding_window, documents=documents, scale=scaling), None
        seq = query.shape[2]
        attention_mask = dense_mask(
            seq, seq, causal=True, window=sliding_window, ids_BS=documents.ids, device=query.device
        )
    elif attention_mask is not None and attention_mask.dtype == torch.int32:
        raise ValueError(
            f"{type(module).__name__} does not pass on the documents of a packed row."
            " Give the model options={'attn_implementation': 'sdpa'}."
        )
    return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
