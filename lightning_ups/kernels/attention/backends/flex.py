"""FlexAttention: any mask that blocks of 128 can skip, and softcap, by a kernel that torch generates.

Its block mask is computed from the ends of the blocks, in (seq / 128) squared operations; torch's `create_block_mask`
evaluates every pair of positions.
"""
# ruff: noqa: N803, ARG001 (shape suffixes are capitals; torch fixes what a mask's function takes)

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lightning_ups._compat.torch.tensors.attention import unfused_flex_allowed
from lightning_ups.kernels.attention.documents import Documents
from lightning_ups.kernels.attention.mask import visible

__all__ = ["BLOCK", "block_mask", "flex"]

BLOCK = 128


def flex(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    causal: bool,
    window: int | None,
    documents: Documents | None,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """Return attention [batch, seq, heads, dim]; on a GPU compiled, inside a compiled function with it."""
    ids = None if documents is None else documents.ids
    mask = None
    if causal or window is not None or ids is not None:
        mask = block_mask(q_BSHD.shape[1], causal=causal, window=window, ids_BS=ids, device=q_BSHD.device)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BTKD, v_BTKD))
    if q.device.type == "cpu" and not torch.is_grad_enabled():
        # Torch looks whether they require gradients, not whether any is made.
        q, k, v = (tensor.detach() for tensor in (q, k, v))
    options = {
        "block_mask": mask,
        "score_mod": _capped(softcap) if softcap else None,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        # For few queries Inductor would take its kernel for decoding, which torch 2.11 cannot configure for all.
        "kernel_options": {"BACKEND": "TRITON"},
    }
    if torch.compiler.is_compiling():
        out = flex_attention(q, k, v, **options)
    elif _compiled_on(q.device):
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        asked = causal, window, ids is not None, softcap, scale
        run = _compiled(asked, (q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3]), trains)
        out = run(q, k, v, **options)
    else:
        with unfused_flex_allowed():
            out = flex_attention(q, k, v, **options)
    return out.transpose(1, 2)


def block_mask(seq: int, *, causal: bool, window: int | None, ids_BS: Tensor | None, device: torch.device) -> BlockMask:
    """Return the block mask of `mask.visible` for ``seq`` queries and keys; ``ids_BS`` never fall along a row."""
    num_blocks = -(-seq // BLOCK)
    first = torch.arange(num_blocks, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp(max=seq - 1)
    q_first, q_last, k_first, k_last = first[:, None], last[:, None], first[None, :], last[None, :]
    some = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=device)
    every = (last - first + 1 == BLOCK)[:, None] & (last - first + 1 == BLOCK)[None, :]
    if causal:
        some, every = some & (q_last >= k_first), every & (q_first >= k_last)
    if window is not None:
        some, every = some & (q_first - k_last < window), every & (q_last - k_first < window)
        if not causal:
            some, every = some & (k_first - q_last < window), every & (k_last - q_first < window)
    some, every = some[None, None], every[None, None]
    if ids_BS is not None:
        low, high = ids_BS[:, first], ids_BS[:, last]
        overlap = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
        one = (low[:, :, None] == high[:, None, :]) & (low[:, None, :] == high[:, :, None])
        some, every = some & overlap[:, None], every & one[:, None]
    partial = _listed(some & ~every)
    full = _listed(every)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=_mask_mod(causal=causal, window=window, ids_BS=ids_BS),
        seq_lengths=(seq, seq),
    )  # fmt: skip


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # How many blocks of keys each block of queries has, and which, those first.
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _mask_mod(*, causal: bool, window: int | None, ids_BS: Tensor | None) -> Callable[..., Tensor]:
    if ids_BS is None:

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(query, key, causal=causal, window=window)

        return mask_mod

    def document_mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_id, key_id = ids_BS[batch, query], ids_BS[batch, key]
        return visible(query, key, causal=causal, window=window, query_id=query_id, key_id=key_id)

    return document_mask_mod


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _compiled_on(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _compiled(*kind: Any) -> Callable[..., Any]:
    # Dynamo keeps what it compiles by code object, eight of each: every kind of attention has a copy of its own, so
    # that these are for its lengths. It raises where it would otherwise run eagerly.
    code = _run.__code__.replace(co_name=f"flex_{_compiled.cache_info().misses}")
    return torch.compile(FunctionType(code, globals()), fullgraph=True)


def _run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flex_attention(q, k, v, **options)
