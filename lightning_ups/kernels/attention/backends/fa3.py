"""FlashAttention-3, built from source: Hopper. Called as torch's own interface to it calls it."""
# ruff: noqa: N803 (shape suffixes are capitals)

from typing import Any

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.attention import load_fa3
from lightning_ups.kernels.attention.request import Request

__all__ = ["backward", "forward"]

_FEATURE = "Attention by backend 'fa3'"


def forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Return the output [batch, seq, heads, dim] and the log-sum-exp of the scores in float32."""
    q, k, v = (_packed(tensor, request) for tensor in (q_BSHD, k_BTKD, v_BTKD))
    left, right = request.window_sides if request.window else (-1, -1)
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
        *(left, right),
        0,  # chunk of keys
        request.softcap,
        True,  # rotary interleaved
        None,  # the scheduler's plan
        1 if torch.are_deterministic_algorithms_enabled() else 0,  # splits
        None,  # packing of groups
        0,  # reserved multiprocessors
    ]
    out, lse, *_ = load_fa3(feature=_FEATURE).fwd(*arguments)
    return out.view(q_BSHD.shape), lse.contiguous()


def backward(
    grad_BSHD: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, out_BSHD: Tensor, lse: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, contiguous."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q_BSHD, k_BTKD, v_BTKD)]
    left, right = request.window_sides if request.window else (-1, -1)
    arguments: list[Any] = [
        *(_packed(tensor, request) for tensor in (grad_BSHD, q_BSHD, k_BTKD, v_BTKD, out_BSHD)),
        lse.contiguous(),
        *(_packed(tensor, request) for tensor in grads),
        *(request.cu_seqlens,) * 2,
        *(None,) * 2,  # used lengths
        *(_longest(request),) * 2,
        request.scale,
        request.causal,
        *(left, right),
        request.softcap,
        torch.are_deterministic_algorithms_enabled(),
        0,  # reserved multiprocessors
    ]
    load_fa3(feature=_FEATURE).bwd(*arguments)
    return grads[0], grads[1], grads[2]


def _packed(tensor: Tensor, request: Request) -> Tensor:
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor if request.cu_seqlens is None else tensor.flatten(0, 1)


def _longest(request: Request) -> int | None:
    return None if request.cu_seqlens is None else request.max_seqlen
