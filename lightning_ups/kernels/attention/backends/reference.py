"""Attention in eager torch: the specification of every backend.

B batch, S queries, T keys, H query heads, K heads of keys and values, G query heads per head of keys, D head dim.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.autograd import without_autocast
from lightning_ups.kernels.attention.documents import Documents
from lightning_ups.kernels.attention.mask import dense_mask

__all__ = ["reference_attention"]


def reference_attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention [batch, seq, heads, dim], computed at least in float32, with all scores in memory.

    Scores are ``q @ k * scale`` (``scale`` is ``dim ** -0.5`` if None); with ``softcap`` they become ``softcap *
    tanh(score / softcap)``. The softmax runs over the keys given by `mask.visible`. Query heads share the heads of keys
    and values in order: heads ``0 .. G - 1`` use the first.
    """
    with without_autocast(q_BSHD.device.type):  # which would compute the products in low precision
        return _attention(q_BSHD, k_BTKD, v_BTKD, causal, window, documents, softcap, scale)


def _attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    causal: bool,  # noqa: FBT001
    window: int | None,
    documents: Documents | None,
    softcap: float | None,
    scale: float | None,
) -> Tensor:
    kv_heads, dim = k_BTKD.shape[2:]
    precise = torch.promote_types(q_BSHD.dtype, torch.float32)
    q_BSKGD = q_BSHD.to(precise).unflatten(2, (kv_heads, -1))
    scores_BKGST = torch.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD.to(precise)) * (
        dim**-0.5 if scale is None else scale
    )
    if softcap:
        scores_BKGST = softcap * torch.tanh(scores_BKGST / softcap)
    ids = None if documents is None else documents.ids
    seen = dense_mask(q_BSHD.shape[1], k_BTKD.shape[1], causal=causal, window=window, ids_BS=ids, device=q_BSHD.device)
    if seen is not None:
        scores_BKGST = scores_BKGST.masked_fill(~seen.unsqueeze(1), float("-inf"))
    out_BSKGD = torch.einsum("bkgst,btkd->bskgd", scores_BKGST.softmax(-1), v_BTKD.to(precise))
    return out_BSKGD.flatten(2, 3).to(q_BSHD.dtype)
