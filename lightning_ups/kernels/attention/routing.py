"""Sending what models ask of `F.scaled_dot_product_attention` to a backend of this package."""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import sdpa_kernel

from lightning_ups._compat.attention import scaled_dot_product_attention
from lightning_ups.kernels.attention.api import checked, in_autocast_dtype
from lightning_ups.kernels.attention.auto import choose
from lightning_ups.kernels.attention.flex import flex
from lightning_ups.kernels.attention.kind import Kind, kind_of
from lightning_ups.kernels.attention.operator import attention_forward
from lightning_ups.kernels.attention.reference import reference_attention
from lightning_ups.kernels.attention.sdpa import TORCH_BACKENDS
from lightning_ups.kernels.attention.support import Backend, check, refusal

__all__ = ["routed_attention"]

_NAME = "scaled_dot_product_attention"


@contextmanager
def routed_attention(backends: Backend | Sequence[Backend]) -> Iterator[None]:
    """Let ``F.scaled_dot_product_attention`` run by ``backends`` while the context is open, compiled code included.

    One backend does what is asked or raises, as in `attention`: also for tensors without heads or with more leading
    axes, and for a single head of keys, which torch itself gives to its slowest kernel. Of several, each call takes the
    first that can; with ``"auto"`` at the end, the fastest that can. Contexts nest, and the inner one counts.

    The function is replaced in ``torch.nn.functional`` and in every module that holds it by its name, and put back
    afterwards; compiled code is guarded by which function it found, so it is compiled anew and never stale. A
    reference kept elsewhere, as in an attribute of a module, is not seen, nor are the fused inference paths of
    ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``.

    Raises:
        ValueError: If a backend is unknown, none is named, or others would come after ``"auto"``.
    """
    # Not a TorchFunctionMode: it would also pass every other function of torch through Python, in eager and in tracing.
    replacement = _router(_priority(backends))
    with ExitStack() as undo:
        present = getattr(F, _NAME)
        for module in _holders(present):
            undo.enter_context(patch.object(module, _NAME, replacement))
        yield


def _priority(backends: Backend | Sequence[Backend]) -> tuple[Backend, ...]:
    names = (backends,) if isinstance(backends, str) else tuple(backends)
    unknown = [name for name in names if name not in get_args(Backend)]
    if unknown or not names:
        raise ValueError(
            f"routed_attention was given {backends!r}."
            " It takes a backend, or several in order of preference."
            f" Use names of {', '.join(map(repr, get_args(Backend)))}."
        )
    if "auto" in names[:-1]:
        raise ValueError(
            f"routed_attention was given {backends!r}, with 'auto' before others."
            " It can do whatever is asked, so that what follows it would never be used."
            " Put 'auto' at the end, or leave it out."
        )
    return names


def _holders(function: Callable[..., Tensor]) -> list[ModuleType]:
    held = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(_NAME) is function]
    return [module for module in held if not module.__name__.startswith("lightning_ups.")]


@cache  # one function for each priority: entering a context again finds the compiled code of the last time
def _router(priority: tuple[Backend, ...]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        return _routed(
            priority,
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    return scaled_dot_product_attention


def _routed(
    priority: tuple[Backend, ...],
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    named = "auto" not in priority
    if named and (seen := _with_heads(q_BHSD, k_BKTD, v_BKTD, attn_mask)) is not None:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        out = _routed(priority, *seen[:3], attn_mask=seen[3], enable_gqa=enable_gqa, **options)
        return out.reshape(*q_BHSD.shape[:-1], out.shape[-1])
    if named and _shares_one_head(q_BHSD, k_BKTD, v_BKTD):
        enable_gqa = True
    plain = q_BHSD.dim() == k_BKTD.dim() == v_BKTD.dim() == 4 and not q_BHSD.is_nested and q_BHSD.device.type != "meta"
    if (
        not plain
        or (q_BHSD.shape[1] != k_BKTD.shape[1] and not enable_gqa)
        or ("auto" in priority and not _regular(q_BHSD, k_BKTD, v_BKTD, attn_mask))
    ):
        # Other shapes, nested tensors and mistakes: torch's own function knows best what to do, or to say.
        return scaled_dot_product_attention(
            q_BHSD, k_BKTD, v_BKTD, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q_BHSD, k_BKTD, v_BKTD = in_autocast_dtype(q_BHSD, k_BKTD, v_BKTD)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHSD, k_BKTD, v_BKTD))
    kind = kind_of(q, k, v, causal=is_causal, mask=attn_mask, dropout=dropout_p > 0)
    name = _first(priority, tuple(kind))
    if name == "auto":
        name = choose(kind, batch=q.shape[0], seq=q.shape[1], keys=k.shape[1])
    if name in TORCH_BACKENDS:
        if name == "efficient" and enable_gqa:  # it knows no groups
            groups = q_BHSD.shape[1] // k_BKTD.shape[1]
            k_BKTD, v_BKTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (k_BKTD, v_BKTD))
        with sdpa_kernel(TORCH_BACKENDS[name]):
            return scaled_dot_product_attention(
                q_BHSD, k_BKTD, v_BKTD, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if name == "reference":
        out = reference_attention(q, k, v, causal=is_causal, scale=factor)
    elif name == "flex":
        out = flex(q, k, v, causal=is_causal, window=None, documents=None, softcap=None, scale=factor)
    else:
        out = attention_forward(q, k, v, None, q.shape[1], is_causal, 0, 0.0, float(factor), name)[0]
    return out.transpose(1, 2)


def _with_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Return views [batch, heads, seq, dim] of tensors with other leading axes, for which torch has the slowest kernel.

    None: they have these axes, or torch's own function is to say what it makes of them.
    """
    axes, lead = q.dim(), q.shape[:-2]
    if axes in (0, 1, 4) or q.is_nested or k.shape[:-2] != lead or v.shape[:-2] != lead:
        return None
    if axes > 4:
        if mask is not None and mask.dim() > 2:
            return None
        return (*(tensor.flatten(0, axes - 4) for tensor in (q, k, v)), mask)  # type: ignore[return-value]
    if axes == 2:
        return q[None, None], k[None, None], v[None, None], mask
    return q[:, None], k[:, None], v[:, None], mask[:, None] if mask is not None and mask.dim() == 3 else mask


def _shares_one_head(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # Torch broadcasts a single head of keys, unasked.
    return q.dim() == k.dim() == v.dim() == 4 and not q.is_nested and k.shape[1] == v.shape[1] == 1 < q.shape[1]


def _regular(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None) -> bool:
    # Whether a `Kind` says all that decides which kernel can do it. Torch broadcasts, and copies, for its slower ones.
    return (
        q_BHSD.shape[0] == k_BKTD.shape[0] == v_BKTD.shape[0]
        and k_BKTD.shape[1:3] == v_BKTD.shape[1:3]
        and q_BHSD.shape[3] == k_BKTD.shape[3]
        and all(tensor.stride(-1) == 1 for tensor in (q_BHSD, k_BKTD, v_BKTD))
        and (mask is None or mask.dim() in (2, 4))
    )


@torch.compiler.assume_constant_result
def _first(priority: tuple[Backend, ...], kind: tuple[Any, ...]) -> Backend:
    if len(priority) == 1:
        only = priority[0]
        return only if only == "auto" else checked(only, kind)
    return _first_of_several(priority, Kind(*kind))


@cache
def _first_of_several(priority: tuple[Backend, ...], kind: Kind) -> Backend:
    reasons = {}
    for name in priority:
        if name == "auto":
            return name
        found = refusal(name, kind)
        if found is None:
            check(name, kind)
            return name
        reasons[name] = found[0]
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(
        f"None of the attention backends {', '.join(map(repr, priority))} can do what the model asks."
        f" {listed}."
        " Add another, such as 'math' or 'auto', at the end."
    )
