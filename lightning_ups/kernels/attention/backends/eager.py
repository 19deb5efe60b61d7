"""FlashAttention's forward and backward formulas in eager torch, behind the same operator as the fast kernels.

It replaces them if there is no GPU: in tests of the operator, and where operations are counted.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

import torch
from torch import Tensor

from lightning_ups.kernels.attention.mask import dense_mask
from lightning_ups.kernels.attention.request import Request

__all__ = ["backward", "forward"]


def forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output [batch, seq, heads, dim] and the log-sum-exp of the scores in float32."""
    scores_BKGST, _ = _scores(q_BSHD, k_BTKD, request)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    weights = (scores_BKGST - lse_BKGS.unsqueeze(-1)).exp()
    out_BSKGE = torch.einsum("bkgst,btke->bskge", weights, v_BTKE.to(weights.dtype))
    out = out_BSKGE.flatten(2, 3).to(q_BSHD.dtype).contiguous()
    lse_BHS = lse_BKGS.flatten(1, 2).float().contiguous()
    return out, lse_BHS if request.cu_seqlens is None else lse_BHS.transpose(0, 1).flatten(1).contiguous()


def backward(
    grad_BSHE: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, out_BSHE: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    batch, _, heads, _ = q_BSHD.shape
    kv_heads = k_BTKD.shape[2]
    scores_BKGST, slope = _scores(q_BSHD, k_BTKD, request)
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


def _scores(q_BSHD: Tensor, k_BTKD: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    # The masked scores, and their derivative with respect to the product.
    precise = torch.promote_types(q_BSHD.dtype, torch.float32)
    q_BSKGD = q_BSHD.to(precise).unflatten(2, (k_BTKD.shape[2], -1))
    scores = torch.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD.to(precise)) * request.scale
    slope = torch.ones((), dtype=precise, device=scores.device)
    if request.softcap:
        bent = torch.tanh(scores / request.softcap)
        scores, slope = request.softcap * bent, 1 - bent * bent
    seen = dense_mask(
        q_BSHD.shape[1],
        k_BTKD.shape[1],
        causal=request.causal,
        window=request.window or None,
        ids_BS=_ids(request.cu_seqlens, q_BSHD),
        device=scores.device,
    )
    return scores if seen is None else scores.masked_fill(~seen.unsqueeze(1), float("-inf")), slope


def _ids(cu_seqlens: Tensor | None, q_BSHD: Tensor) -> Tensor | None:
    if cu_seqlens is None:
        return None
    batch, seq = q_BSHD.shape[:2]
    positions = torch.arange(batch * seq, device=q_BSHD.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=True).view(batch, seq)
