"""Torch's own backends: cuDNN, FlashAttention-2, memory-efficient attention, and plain products."""
# ruff: noqa: N803 (shape suffixes are capitals)

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ups._compat.torch.flags import allowed_attention
from lightning_ups._compat.torch.tensors.attention import flash2_packed, scaled_dot_product_attention
from lightning_ups.kernels.attention.masks import Documents, dense_mask
from lightning_ups.kernels.attention.support import constant

TorchBackend = Literal["math", "efficient", "flash", "cudnn"]
TORCH_BACKENDS: dict[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_TURN = RLock()  # the allowed kernels are one state for all threads


def only(kernels: Sequence[SDPBackend]) -> AbstractContextManager[Any]:
    """Return a context in which torch may use only ``kernels``, in this order; one thread at a time."""
    several = len(kernels) > 1
    if torch.compiler.is_compiling():  # during tracing; compiled code does not check again
        return sdpa_kernel([*kernels], set_priority=several)
    return _in_turn([*kernels], set_priority=several)


@contextmanager
def _in_turn(kernels: list[SDPBackend], *, set_priority: bool) -> Iterator[None]:
    with _TURN, sdpa_kernel(kernels, set_priority=set_priority):
        yield


def allowed() -> frozenset[SDPBackend]:
    """Return the kernels that torch may use, ignoring contexts of `only` in other threads."""
    with _TURN:
        return allowed_attention()


def torch_attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    backend: TorchBackend,
    causal: bool,
    window: int | None,
    documents: Documents | None,
    scale: float,
) -> Tensor:
    """Return attention [batch, seq, heads, dim] computed by this torch kernel, and no other.

    On CUDA, FlashAttention-2 supports windows and documents directly. The other kernels get a mask with a byte for each
    pair of a query and a key, [batch or 1, 1, seq, seq].
    """
    bounded = window is not None or documents is not None
    if bounded and backend == "flash" and q_BSHD.is_cuda:
        return flash2_packed(
            q_BSHD,
            k_BTKD,
            v_BTKD,
            cu_seqlens=None if documents is None else documents.cu_seqlens,
            max_seqlen=q_BSHD.shape[1] if documents is None else documents.max_seqlen,
            causal=causal,
            window=window,
            scale=scale,
        )
    mask = None
    if bounded:
        mask = dense_mask(
            q_BSHD.shape[1],
            k_BTKD.shape[1],
            causal=causal,
            window=window,
            ids_BS=None if documents is None else documents.ids,
            device=q_BSHD.device,
        )
    grouped = constant(q_BSHD.shape[2] != k_BTKD.shape[2])
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BTKD, v_BTKD))
    if grouped and backend == "efficient":  # it has no grouped heads
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = False
    with only([TORCH_BACKENDS[backend]]):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)
