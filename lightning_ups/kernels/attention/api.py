"""`attention`: one function for every kernel, with the choice of the kernel as an argument."""

import math
from typing import Any, cast, get_args

import torch
from torch import Tensor

from lightning_ups.kernels.attention.auto import choose
from lightning_ups.kernels.attention.flex import flex
from lightning_ups.kernels.attention.masks import Documents
from lightning_ups.kernels.attention.operator import attention_forward
from lightning_ups.kernels.attention.reference import reference_attention
from lightning_ups.kernels.attention.sdpa import TORCH_BACKENDS, TorchBackend, torch_attention
from lightning_ups.kernels.attention.support import BACKENDS, Backend, KernelName, Kind, check, constant, kind_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return attention [batch, seq, heads, dim], as specified by `reference.reference_attention`.

    The layout is that of a projection's output with its last axis split into heads. Inputs are not copied, even if they
    are views of one fused product of queries, keys and values, and ``flatten(2)`` of the result is the input of the
    next projection. Under autocast, the tensors are cast as torch's own attention casts them.

    Args:
        q: Queries [batch, seq, heads, dim].
        k: Keys [batch, keys, kv heads, dim]; the query heads are a multiple of the kv heads and share them in
            order.
        v: Values [batch, keys, kv heads, dim].
        causal: Whether a query sees no later key.
        window: A query sees only keys less than this many positions away; with ``causal``, the last ``window`` keys
            including its own.
        documents: A query sees only keys of its own document.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None or 0: unchanged.
        scale: Factor of the scores, above 0; None: ``dim ** -0.5``.
        backend: The kernel. A named one is used or raises; ``"auto"`` is the fastest one that supports the call
            (`lightning_ups.kernels.attention.auto`).

    Raises:
        ValueError: If shapes do not match, or the backend does not support the call.
        TypeError: If scale or softcap is a tensor, or the tensors differ in dtype or device.
        ModuleNotFoundError: If the backend's package is missing.
        ImportError: If the backend's package cannot be loaded.

    Example::

        qkv = self.qkv(x).unflatten(-1, (-1, head_dim))  # [batch, seq, heads + 2 * kv_heads, head_dim]
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        y = self.out(attention(q, k, v).flatten(2))
    """
    q, k, v = (dense(tensor) for tensor in in_autocast_dtype(q, k, v))
    causal = constant(causal)
    _validate_numbers(softcap=softcap, scale=scale)
    _validate(q, k, v, causal=causal, window=window, documents=documents)
    kind = kind_of(
        q, k, v, causal=causal, window=window is not None, documents=documents is not None, softcap=bool(softcap)
    )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    cu_seqlens = None if documents is None else documents.cu_seqlens
    max_seqlen = q.shape[1] if documents is None else documents.max_seqlen
    if q.device.type == "meta" and backend in get_args(Backend):  # nothing is computed, and all kernels count the same
        return attention_forward(
            q, k, v, cu_seqlens, max_seqlen, causal, window or 0, float(softcap or 0), float(factor), "eager"
        )[0]
    if backend == "auto":
        num_documents = None if documents is None else documents.cu_seqlens.shape[0] - 1
        name = choose(kind, batch=q.shape[0], seq=q.shape[1], keys=k.shape[1], window=window, documents=num_documents)
    else:
        name = checked(backend, tuple(kind))
    if name == "reference":
        return reference_attention(
            q, k, v, causal=causal, window=window, documents=documents, softcap=softcap, scale=factor
        )
    if name in TORCH_BACKENDS:
        kernel = cast("TorchBackend", name)
        return torch_attention(q, k, v, backend=kernel, causal=causal, window=window, documents=documents, scale=factor)
    if name == "flex":
        return flex(q, k, v, causal=causal, window=window, documents=documents, softcap=softcap, scale=factor)
    return attention_forward(
        q, k, v, cu_seqlens, max_seqlen, causal, window or 0, float(softcap or 0), float(factor), name
    )[0]


@torch.compiler.assume_constant_result
def checked(backend: KernelName, kind: tuple[Any, ...]) -> KernelName:
    """Return ``backend``, checked to support ``kind``, a `Kind`; a constant in compiled functions."""
    if backend not in BACKENDS:  # before `check`, which is cached: a list has no hash
        raise ValueError(
            f"backend={backend!r} is not a kernel of attention. Use one of {', '.join(map(repr, get_args(Backend)))}."
        )
    check(backend, Kind(*kind))
    return backend


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``tensors`` in autocast's dtype if it is on, as in torch's own attention."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a dense last axis, the only layout that kernels require."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    # For a single element, `contiguous` would keep the stride, which torch checks.
    return tensor.clone(memory_format=torch.contiguous_format)


def _validate(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, documents: Documents | None
) -> None:
    def shapes() -> str:
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}"

    fit = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fit or not k.shape[2] or not q.shape[3] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"Attention does not take {shapes()}. They are [batch, seq, heads, dim], with query heads a multiple of key"
            " heads. Use transpose(1, 2) on tensors that are [batch, heads, seq, dim]."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device) or not q.is_floating_point():
        told = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (q, k, v))
        raise TypeError(
            f"Attention does not take queries, keys and values that are {told}."
            " Cast and move them to one floating-point dtype and device first, such as by q.type_as(v)."
        )
    if (causal or window is not None or documents is not None) and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"Causal attention, or one with a window or documents, does not take {shapes()}: it needs as many queries"
            " as keys. Use causal=False for attention to another sequence."
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} leaves no key to see. Use a window of 1 or more, or None.")
    if documents is not None and (documents.ids.shape != q.shape[:2] or documents.ids.device != q.device):
        raise ValueError(
            f"documents of shape {tuple(documents.ids.shape)} on {documents.ids.device} do not fit queries"
            f" {tuple(q.shape)} on {q.device}. Cut and move documents as the tokens are cut and moved."
        )


def _validate_numbers(*, softcap: float | None, scale: float | None) -> None:
    if isinstance(scale, Tensor) or isinstance(softcap, Tensor):
        raise TypeError(
            f"{'scale' if isinstance(scale, Tensor) else 'softcap'} is a tensor, of which kernels give no gradient."
            " Multiply the queries by a scale that is learned, or use item() of one that is not."
        )
    if scale is not None and not 0 < scale < math.inf:  # kernels find the largest score of a row before they scale it
        raise ValueError(f"scale={scale} is not above 0, or not finite. Use another, or None for dim ** -0.5.")
    if softcap is not None and not 0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap} is below 0, or not finite. Use a softcap above 0, or None for none.")
