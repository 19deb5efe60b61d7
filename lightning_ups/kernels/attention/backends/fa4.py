"""FlashAttention-4 (package flash-attn-4, written in CuTe): Hopper and Blackwell."""
# ruff: noqa: N803 (shape suffixes are capitals)

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.attention import load_fa4
from lightning_ups.kernels.attention.request import Request

__all__ = ["backward", "forward"]

_FEATURE = "Attention by backend 'fa4'"


def forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output [batch, seq, heads, dim] and the log-sum-exp of the scores in float32."""
    q, k, v = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKE))
    documents = {}
    if request.cu_seqlens is not None:
        documents = {
            "cu_seqlens_q": request.cu_seqlens,
            "cu_seqlens_k": request.cu_seqlens,
            "max_seqlen_q": request.max_seqlen,
            "max_seqlen_k": request.max_seqlen,
        }
    # It returns more than the output and the log-sum-exp, and how much more depends on the release.
    out, lse = load_fa4(feature=_FEATURE)._flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=request.scale,
        causal=request.causal,
        softcap=request.softcap or None,
        **_window(request),
        return_lse=True,
        **documents,
    )[:2]
    return out.view(*q_BSHD.shape[:3], v_BTKE.shape[3]), lse


def backward(
    grad_BSHE: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, out_BSHE: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, contiguous."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q_BSHD, k_BTKD, v_BTKE)]
    q, k, v, out, grad = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKE, out_BSHE, grad_BSHE))
    dq, dk, dv = (_packed(tensor, request) for tensor in grads)
    documents = {}
    if request.cu_seqlens is not None:
        documents = {
            "cu_seqlens_q": request.cu_seqlens,
            "cu_seqlens_k": request.cu_seqlens,
            "max_seqlen_q": request.max_seqlen,
            "max_seqlen_k": request.max_seqlen,
        }
    load_fa4(feature=_FEATURE)._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        softmax_scale=request.scale,
        causal=request.causal,
        softcap=request.softcap,
        **_window(request),
        **documents,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=dq,
        dk=dk,
        dv=dv,
    )
    return grads[0], grads[1], grads[2]


def _packed(tensor: Tensor, request: Request) -> Tensor:
    return tensor if request.cu_seqlens is None else tensor.flatten(0, 1)


def _window(request: Request) -> dict[str, int | None]:
    if not request.window:
        return {}
    left, right = request.window_sides
    return {"window_size_left": left, "window_size_right": right}
