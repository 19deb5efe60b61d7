"""Routes calls of `F.scaled_dot_product_attention` to backends of this package."""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend

from lightning_ups._compat.torch.tensors.attention import holders, scaled_dot_product_attention, torch_choice
from lightning_ups.kernels.attention.api import dense, in_autocast_dtype
from lightning_ups.kernels.attention.auto import choose
from lightning_ups.kernels.attention.flex import flex
from lightning_ups.kernels.attention.operator import attention_forward
from lightning_ups.kernels.attention.reference import reference_attention
from lightning_ups.kernels.attention.sdpa import TORCH_BACKENDS, allowed, only
from lightning_ups.kernels.attention.support import Backend, Kind, check, kind_of, refusal

_NAME = "scaled_dot_product_attention"


@contextmanager
def routed_attention(backends: Backend | Sequence[Backend]) -> Iterator[None]:
    """Let ``F.scaled_dot_product_attention`` use ``backends`` while the context is open, also in compiled code.

    A single backend is used or raises, as in `attention`. Of several, each call uses the first that supports it; with
    ``"auto"`` at the end, the fastest that does. Calls that torch would broadcast, nested tensors and tensors that are
    not [batch, heads, seq, dim] are left to torch's function: with ``"auto"`` to all its kernels, otherwise to those
    that are named. Contexts nest, and the inner one applies.

    A model's own choice of torch kernels has priority: if other kernels of torch are allowed than when the context was
    entered, as inside of ``with sdpa_kernel(...)``, the call is not routed.

    The function is replaced in ``torch.nn.functional`` and in every module that has imported it, under any name, and
    restored afterwards, also in modules imported meanwhile. Compiled code has a guard on the function, so it is
    recompiled and never stale. References kept elsewhere, such as in an attribute of a module, are not replaced, nor
    are the fused inference paths of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``.

    Raises:
        ValueError: If a backend is unknown, none is named, or others follow ``"auto"``.
    """
    # Not a TorchFunctionMode, which would also pass every other torch function through Python, in eager mode and in
    # tracing.
    replacement = _router(priority := _priority(backends))
    if not _CALLED.get(priority):
        _CALLED.pop(priority, None)
    with ExitStack() as undo:
        present = getattr(F, _NAME)
        _ALLOWED.append(allowed())
        _AS_TORCH.clear()  # so that has_routed and the records of decisions describe this context only
        undo.callback(_ALLOWED.pop)
        undo.callback(_put_back, replacement, present)
        for module, name in _holders(present):
            undo.enter_context(patch.object(module, name, replacement))
        yield


def has_routed(backends: Backend | Sequence[Backend]) -> bool:
    """Return whether a call used ``backends`` since their context was last entered, or may have in compiled code.

    Calls of code compiled in an earlier context of this process are not recorded.
    """
    return _priority(backends) in _CALLED


_CALLED: dict[tuple[Backend, ...], bool] = {}  # by whether the calling code was traced
_AS_TORCH: set[tuple[Any, ...]] = set()  # eager calls for which torch itself would choose the same kernel
_ALLOWED: list[frozenset[SDPBackend]] = []  # torch's allowed kernels when each of the open contexts was entered


def _priority(backends: Backend | Sequence[Backend]) -> tuple[Backend, ...]:
    names = (backends,) if isinstance(backends, str) else tuple(backends)
    unknown = [name for name in names if name not in get_args(Backend)]
    if unknown or not names:
        raise ValueError(
            f"routed_attention does not know {backends!r}. Use names of {', '.join(map(repr, get_args(Backend)))}."
        )
    if "auto" in names[:-1]:
        raise ValueError(
            f"routed_attention was given {backends!r}: backends after 'auto' would never be used."
            " Put 'auto' at the end, or leave it out."
        )
    return names


def _holders(function: Callable[..., Tensor]) -> list[tuple[ModuleType, str]]:
    return [(module, name) for module, name in holders(function) if not module.__name__.startswith("lightning_ups.")]


def _put_back(replacement: Callable[..., Tensor], present: Callable[..., Tensor]) -> None:
    if present is not replacement:  # otherwise an outer context's
        for module, name in _holders(replacement):  # modules imported meanwhile
            setattr(module, name, present)


@cache  # one function per priority: re-entering a context finds the compiled code of the last time
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
        # Routing takes about 0.1 ms of host time, which is wasted if torch would do the same.
        call = None
        if not torch.compiler.is_compiling() and priority == ("auto",) and attn_mask is None and _dense(query):
            call = _call_of(query, key, value, dropout_p, is_causal=is_causal, grouped=enable_gqa)
            if call in _AS_TORCH:
                return _by_torch(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if _model_chose_kernels():
            return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        _note(priority, torch.compiler.is_compiling())
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
            call=call,
        )

    return scaled_dot_product_attention


def _dense(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_nested


def _call_of(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, *, is_causal: bool, grouped: bool
) -> tuple[Any, ...]:
    """Return everything that the choice for an eager call without a mask depends on."""
    tensors = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (query, key, value)]
    kind = query.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (*tensors, dropout > 0, is_causal, grouped, cast, torch.is_grad_enabled())


_by_torch = scaled_dot_product_attention  # its name is also the replacement's


@torch.compiler.assume_constant_result
def _model_chose_kernels() -> bool:
    # Dynamo enters `sdpa_kernel` during tracing, so this works there, too.
    return bool(_ALLOWED) and allowed() != _ALLOWED[-1]


@torch.compiler.assume_constant_result
def _note(priority: tuple[Backend, ...], traced: bool) -> None:  # noqa: FBT001
    _CALLED[priority] = traced or _CALLED.get(priority, False)


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
    call: tuple[Any, ...] | None = None,
) -> Tensor:
    named = "auto" not in priority
    if attn_mask is not None and q_BHSD.dtype is torch.float64 and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()  # torch's CPU flash kernel would read the bits of another dtype as float64
    if named and _has_four_axes(q_BHSD, k_BKTD, v_BKTD):
        q_BHSD, k_BKTD, v_BKTD = map(dense, (q_BHSD, k_BKTD, v_BKTD))
        if k_BKTD.shape[1] == v_BKTD.shape[1] == 1 < q_BHSD.shape[1]:  # which torch broadcasts
            enable_gqa = True  # not `or`, which may return a symbol
    if q_BHSD.device.type == "meta" or not _is_usual(q_BHSD, k_BKTD, v_BKTD, attn_mask, grouped=enable_gqa):
        # Other shapes, nested tensors and mistakes: torch's own function handles them, or raises the right error.
        chosen = _only_of(priority, q_BHSD, k_BKTD, v_BKTD, attn_mask) if named else nullcontext()
        with chosen:
            return scaled_dot_product_attention(
                q_BHSD, k_BKTD, v_BKTD, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    q_BHSD, k_BKTD, v_BKTD = in_autocast_dtype(q_BHSD, k_BKTD, v_BKTD)
    if attn_mask is not None:  # Dynamo requires a float mask to have the dtype of the queries
        (attn_mask,) = in_autocast_dtype(attn_mask)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHSD, k_BKTD, v_BKTD))
    kind = kind_of(q, k, v, causal=is_causal, mask=attn_mask, dropout=dropout_p > 0)
    name = _first(priority, tuple(kind))
    if name == "auto":
        name = choose(kind, batch=q.shape[0], seq=q.shape[1], keys=k.shape[1])
    if name in TORCH_BACKENDS:
        if call is not None and TORCH_BACKENDS[name] == torch_choice(
            q_BHSD, k_BKTD, v_BKTD, dropout=dropout_p, is_causal=is_causal, scale=scale, grouped=enable_gqa
        ):
            _AS_TORCH.add(call)
        if name == "efficient" and enable_gqa:  # it has no grouped heads
            groups = q_BHSD.shape[1] // k_BKTD.shape[1]
            k_BKTD, v_BKTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (k_BKTD, v_BKTD))
        with only([TORCH_BACKENDS[name]]):
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


def _has_four_axes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dim() == k.dim() == v.dim() == 4 and not q.is_nested


def _is_usual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, grouped: bool) -> bool:
    # Torch copies, and broadcasts masks, for its slower kernels: then a `Kind` does not determine the choice.
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    return (
        _has_four_axes(q, k, v)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and (mask is None or mask.dim() in (2, 4))
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[3] == k.shape[3]
        and (q.shape[1] % k.shape[1] == 0 if grouped and k.shape[1] else q.shape[1] == k.shape[1])
    )


def _only_of(
    priority: tuple[Backend, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> AbstractContextManager[Any]:
    """Return a context in which torch's own function may use only the named kernels of torch."""
    if q.device.type == "meta":
        return nullcontext()  # nothing is computed
    if kernels := [TORCH_BACKENDS[name] for name in priority if name in TORCH_BACKENDS]:
        return only(kernels)
    what, tensors = ("keys and values", (q, k, v)) if mask is None else ("keys, values and mask", (q, k, v, mask))
    shapes = ", ".join("nested" if tensor.is_nested else str(tuple(tensor.shape)) for tensor in tensors)
    raise ValueError(
        f"The attention backends {', '.join(map(repr, priority))} do not take queries, {what} {shapes}."
        " Use equal [batch, heads, seq, dim], or add 'auto' at the end, which leaves other shapes to torch."
    )


@torch.compiler.assume_constant_result
def _first(priority: tuple[Backend, ...], kind: tuple[Any, ...]) -> Backend:
    return _first_that_can(priority, Kind(*kind))


@cache
def _first_that_can(priority: tuple[Backend, ...], kind: Kind) -> Backend:
    reasons = []
    for name in priority:
        if name == "auto":
            return name
        found = refusal(name, kind)
        if found is None or len(priority) == 1:
            check(name, kind)
            return name
        reasons.append(f"{name}: {found[0]}")
    raise ValueError(
        f"None of the attention backends {', '.join(map(repr, priority))} supports this call. {'; '.join(reasons)}."
        " Add another, such as 'math' or 'auto', at the end."
    )
