"""Attention in eager torch: the specification of every backend.

B batch, S queries, T keys, H query heads, K heads of keys and values, G query heads per head of keys, D head dim.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.autograd import without_autocast
from lightning_ups.kernels.attention.masks import Documents, dense_mask


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
    tanh(score / softcap)``. The softmax runs over the keys given by `masks.visible`. Query heads share the heads of
    keys and values in order: heads ``0 .. G - 1`` use the first.
    """
    ids = None if documents is None else documents.ids
    with without_autocast(q_BSHD.device.type):  # which would compute the products in low precision
        scores_BKGST, _ = _scores(
            q_BSHD,
            k_BTKD,
            causal=causal,
            window=window,
            ids=ids,
            softcap=softcap or 0.0,
            scale=q_BSHD.shape[-1] ** -0.5 if scale is None else scale,
        )
        out_BSKGD = torch.einsum("bkgst,btkd->bskgd", scores_BKGST.softmax(-1), v_BTKD.to(scores_BKGST.dtype))
        return out_BSKGD.flatten(2, 3).to(q_BSHD.dtype)


class Request(NamedTuple):
    """The arguments of a kernel behind `operator.attention_forward`, besides queries, keys and values.

    Args:
        cu_seqlens: [documents + 1] int32, boundaries in the concatenated rows, or None.
        max_seqlen: The maximum length of a document, or the length of a row without documents.
        causal: Whether keys after the query are hidden.
        window: Only keys less than this many positions away are visible; 0: all.
        softcap: The limit of the scores; 0: none.
        scale: The factor of the scores.
    """

    cu_seqlens: Tensor | None
    max_seqlen: int
    causal: bool
    window: int
    softcap: float
    scale: float


def eager_forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, as the fast kernels behind the operator do.

    It replaces them if there is no GPU: in tests of the operator, and where operations are counted.
    """
    scores_BKGST, _ = _scores_of(request, q_BSHD, k_BTKD)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    weights = (scores_BKGST - lse_BKGS.unsqueeze(-1)).exp()
    out_BSKGE = torch.einsum("bkgst,btke->bskge", weights, v_BTKE.to(weights.dtype))
    out = out_BSKGE.flatten(2, 3).to(q_BSHD.dtype).contiguous()
    lse_BHS = lse_BKGS.flatten(1, 2).float().contiguous()
    return out, lse_BHS if request.cu_seqlens is None else lse_BHS.transpose(0, 1).flatten(1).contiguous()


def eager_backward(
    grad_BSHE: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, out_BSHE: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, by FlashAttention's formulas."""
    batch, _, heads, _ = q_BSHD.shape
    kv_heads = k_BTKD.shape[2]
    scores_BKGST, slope = _scores_of(request, q_BSHD, k_BTKD)
    precise = scores_BKGST.dtype
    if request.cu_seqlens is not None:
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
    weights = (scores_BKGST - lse.to(precise).view(batch, kv_heads, heads // kv_heads, -1, 1)).exp()
    grad, out = (tensor.to(precise).unflatten(2, (kv_heads, -1)) for tensor in (grad_BSHE, out_BSHE))
    grad_weights = torch.einsum("bskge,btke->bkgst", grad, v_BTKE.to(precise))
    delta = (grad * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    grad_scores = weights * (grad_weights - delta) * slope * request.scale
    grad_q = torch.einsum("bkgst,btkd->bskgd", grad_scores, k_BTKD.to(precise)).flatten(2, 3)
    grad_k = torch.einsum("bkgst,bskgd->btkd", grad_scores, q_BSHD.to(precise).unflatten(2, (kv_heads, -1)))
    grad_v = torch.einsum("bkgst,bskge->btke", weights, grad)
    return (
        grad_q.to(q_BSHD.dtype).contiguous(),
        grad_k.to(k_BTKD.dtype).contiguous(),
        grad_v.to(v_BTKE.dtype).contiguous(),
    )


def _scores(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    *,
    causal: bool,
    window: int | None,
    ids: Tensor | None,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    # The masked scores, and their derivative with respect to the product.
    precise = torch.promote_types(q_BSHD.dtype, torch.float32)
    q_BSKGD = q_BSHD.to(precise).unflatten(2, (k_BTKD.shape[2], -1))
    scores = torch.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD.to(precise)) * scale
    slope = torch.ones((), dtype=precise, device=scores.device)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    seen = dense_mask(q_BSHD.shape[1], k_BTKD.shape[1], causal=causal, window=window, ids_BS=ids, device=scores.device)
    return scores if seen is None else scores.masked_fill(~seen.unsqueeze(1), float("-inf")), slope


def _scores_of(request: Request, q_BSHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
    cu_seqlens, _, causal, window, softcap, scale = request
    ids = None
    if cu_seqlens is not None:
        batch, seq = q_BSHD.shape[:2]
        positions = torch.arange(batch * seq, device=q_BSHD.device, dtype=cu_seqlens.dtype)
        ids = torch.searchsorted(cu_seqlens, positions, right=True).view(batch, seq)
    return _scores(q_BSHD, k_BTKD, causal=causal, window=window or None, ids=ids, softcap=softcap, scale=scale)
