"""The packages of FlashAttention-4 (flash-attn-4) for Hopper and Blackwell, and FlashAttention-3 for Hopper.

FlashAttention-3 is built from source, and called as torch's own interface to it calls it.
"""
# ruff: noqa: N803 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.attention import load_fa3, load_fa4
from lightning_ups.kernels.attention.reference import Request


def fa4_forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output [batch, seq, heads, dim] and the log-sum-exp of the scores in float32."""
    q, k, v = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKE))
    # It returns more than the output and the log-sum-exp, and how much more depends on the release.
    out, lse = load_fa4(feature="Attention by backend 'fa4'")._flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=request.scale,
        causal=request.causal,
        softcap=request.softcap or None,
        **_options(request),
        return_lse=True,
    )[:2]
    return out.view(*q_BSHD.shape[:3], v_BTKE.shape[3]), lse


def fa4_backward(
    grad_BSHE: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, out_BSHE: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, contiguous."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q_BSHD, k_BTKD, v_BTKE)]
    q, k, v, out, grad = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKE, out_BSHE, grad_BSHE))
    dq, dk, dv = (_packed(tensor, request) for tensor in grads)
    load_fa4(feature="Attention by backend 'fa4'")._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        softmax_scale=request.scale,
        causal=request.causal,
        softcap=request.softcap,
        **_options(request),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=dq,
        dk=dk,
        dv=dv,
    )
    return grads[0], grads[1], grads[2]


def fa3_forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output [batch, seq, heads, dim] and the log-sum-exp of the scores in float32."""
    q, k, v = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKD))
    arguments: list[Any] = [
        *(q, k, v),
        *(None,) * 4,  # new keys and values, a second query, the output
        *(request.cu_seqlens,) * 2,
        *(None,) * 3,  # lengths of new keys, used lengths of queries and keys
        *(_longest(request),) * 2,
        *(None,) * 6,  # pages, batch indices, left padding, rotary cosine, sine and lengths
        *(None,) * 3,  # scales of float8
        request.scale,
        request.causal,
        *_window_sides(request),
        0,  # chunk of keys
        request.softcap,
        True,  # rotary interleaved
        None,  # the scheduler's plan
        1 if torch.are_deterministic_algorithms_enabled() else 0,  # splits
        None,  # packing of groups
        0,  # reserved multiprocessors
    ]
    out, lse, *_ = load_fa3(feature="Attention by backend 'fa3'").fwd(*arguments)
    return out.view(q_BSHD.shape), lse.contiguous()


def fa3_backward(
    grad_BSHD: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, out_BSHD: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, contiguous."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q_BSHD, k_BTKD, v_BTKD)]
    arguments: list[Any] = [
        *(_packed(tensor, request) for tensor in (grad_BSHD, q_BSHD, k_BTKD, v_BTKD, out_BSHD)),
        lse.contiguous(),
        *(_packed(tensor, request) for tensor in grads),
        *(request.cu_seqlens,) * 2,
        *(None,) * 2,  # used lengths
        *(_longest(request),) * 2,
        request.scale,
        request.causal,
        *_window_sides(request),
        request.softcap,
        torch.are_deterministic_algorithms_enabled(),
        0,  # reserved multiprocessors
    ]
    load_fa3(feature="Attention by backend 'fa3'").bwd(*arguments)
    return grads[0], grads[1], grads[2]


def _packed(tensor: Tensor, request: Request) -> Tensor:
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor if request.cu_seqlens is None else tensor.flatten(0, 1)


def _longest(request: Request) -> int | None:
    return None if request.cu_seqlens is None else request.max_seqlen


def _options(request: Request) -> dict[str, Any]:
    # Of FlashAttention-4, which are left out where they say nothing.
    options: dict[str, Any] = {}
    if request.cu_seqlens is not None:
        options = {"cu_seqlens_q": request.cu_seqlens, "cu_seqlens_k": request.cu_seqlens}
        options |= {"max_seqlen_q": request.max_seqlen, "max_seqlen_k": request.max_seqlen}
    if request.window:
        options["window_size_left"], options["window_size_right"] = _window_sides(request)
    return options


def _window_sides(request: Request) -> tuple[int, int]:
    """Return how far a query sees back and ahead, in the packages' words: -1 is unlimited."""
    if not request.window:
        return -1, -1
    return request.window - 1, 0 if request.causal else request.window - 1
