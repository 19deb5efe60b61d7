"""The kind of an attention call, and the limits of each backend, as rules with a reason and a cure."""
# ruff: noqa: N803 (shape suffixes are capitals)

from collections.abc import Callable, Iterator
from functools import cache
from operator import index
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from lightning_ups._compat.torch.tensors.attention import load_fa3, load_fa4, missing_package, torch_refuses

KernelName = Literal["reference", "math", "efficient", "flash", "cudnn", "flex", "fa3", "fa4"]
Backend = Literal["auto", "reference", "math", "efficient", "flash", "cudnn", "flex", "fa3", "fa4"]
BACKENDS: tuple[KernelName, ...] = get_args(KernelName)

_HALF = (torch.bfloat16, torch.float16)


class Kind(NamedTuple):
    """An attention call without its lengths: constant in a model, so that a choice is made once.

    Args:
        device: The device type.
        dtype: The dtype of queries, keys and values.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        head_dim: Dimension of queries and keys.
        value_dim: Dimension of values.
        causal: Whether keys after the query are hidden.
        window: Whether only near keys are visible.
        documents: Whether only keys of the query's document are visible.
        softcap: Whether scores are limited by a tanh.
        mask: Whether a mask tensor is given, to `scaled_dot_product_attention`; `attention` has none.
        mask_trains: Whether the mask needs a gradient.
        dropout: Whether there is dropout; only in `scaled_dot_product_attention`.
        square: Whether there are as many queries as keys.
        one_key: Whether there is a single key.
        trains: Whether gradients are needed.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    window: bool = False
    documents: bool = False
    softcap: bool = False
    mask: bool = False
    mask_trains: bool = False
    dropout: bool = False
    square: bool = True
    one_key: bool = False
    trains: bool = True


def kind_of(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool,
    window: bool = False,
    documents: bool = False,
    softcap: bool = False,
    mask: Tensor | None = None,
    dropout: bool = False,
) -> Kind:
    """Return the kind of a call with tensors [batch, seq, heads, dim], as constants even if sizes are symbolic."""
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    return Kind(
        q_BSHD.device.type,
        q_BSHD.dtype,
        index(q_BSHD.shape[2]),
        index(k_BTKD.shape[2]),
        index(q_BSHD.shape[3]),
        index(v_BTKE.shape[3]),
        constant(causal),
        window,
        documents,
        constant(softcap),
        mask is not None,
        mask is not None and mask.requires_grad,
        constant(dropout),
        constant(queries == keys),
        constant(keys == 1),
        torch.is_grad_enabled() and (q_BSHD.requires_grad or k_BTKD.requires_grad or v_BTKE.requires_grad),
    )


def constant(truth: object) -> bool:
    """Return ``truth`` as a constant; in a compiled function it may be a comparison of symbols."""
    return True if truth else False  # noqa: SIM210  (`bool` of a symbol is one; a branch is not)


class _Rule(NamedTuple):
    backends: tuple[KernelName, ...]
    broken: Callable[[Kind], bool]
    why: str
    cure: str


def _major() -> int:
    return torch.cuda.get_device_capability()[0]


_NO_MASK = (
    "Use causal, window or documents of lightning_ups.kernels.attention instead, or allow another backend such as"
    " 'cudnn', 'efficient' or 'math'"
)

_RULES = (
    _Rule(
        ("fa3", "fa4", "cudnn", "efficient"),
        lambda kind: kind.device != "cuda",
        "It runs on CUDA devices only, and the tensors are on {kind.device!r}",
        "Move the tensors to a GPU, or use backend 'flash' or 'math'",
    ),
    _Rule(
        ("flash", "flex"),
        lambda kind: kind.device not in ("cuda", "cpu"),
        "It runs on CUDA devices and CPUs only, and the tensors are on {kind.device!r}",
        "Use backend 'math'",
    ),
    _Rule(
        ("flex",),
        lambda kind: kind.device == "cpu" and kind.trains,
        "On CPU it has no backward pass, and gradients are required",
        "Use backend 'flash' or 'reference' on CPU, or torch.no_grad()",
    ),
    _Rule(
        ("fa3", "fa4", "cudnn", "flash"),
        lambda kind: kind.device == "cuda" and kind.dtype not in _HALF,
        "On CUDA it takes bfloat16 and float16, not {kind.dtype}",
        "Cast to bfloat16 or run under autocast, or use backend 'efficient' or 'math'",
    ),
    _Rule(
        ("cudnn", "flash", "efficient", "math"),
        lambda kind: kind.softcap,
        "It has no softcap",
        "Use backend 'fa4', 'flex' or 'reference', or leave softcap out",
    ),
    _Rule(
        ("cudnn",),
        lambda kind: kind.window or kind.documents or kind.one_key,
        "It has no window and no documents, and needs at least two keys",
        "Use backend 'fa4', 'flash' or 'flex'",
    ),
    _Rule(
        ("fa3", "fa4", "flex", "reference"),
        lambda kind: kind.mask,
        "It takes no mask tensor",
        _NO_MASK,
    ),
    _Rule(
        ("flash",),
        lambda kind: kind.device == "cuda" and kind.mask,
        "On CUDA it takes no mask tensor",
        _NO_MASK,
    ),
    _Rule(
        ("flash", "cudnn"),
        lambda kind: kind.mask_trains,
        "It has no gradient of a mask tensor",
        "Use backend 'efficient' or 'math'",
    ),
    _Rule(
        ("flash",),
        lambda kind: kind.device == "cpu" and kind.dropout,
        "On CPU it has no dropout",
        "Set the model's attention dropout to 0, or allow backend 'math'",
    ),
    _Rule(
        ("fa3", "fa4", "flex", "reference"),
        lambda kind: kind.dropout,
        "It has no dropout",
        "Set the model's attention dropout to 0, or allow another backend such as 'flash' or 'cudnn'",
    ),
    _Rule(
        ("fa3", "fa4", "flex", "flash", "reference"),
        lambda kind: kind.causal and not kind.square,
        "Causal attention with different numbers of queries and keys is ambiguous: torch aligns the first keys, the"
        " FlashAttention packages the last",
        "Give as many queries as keys, or allow another backend such as 'efficient' or 'math'",
    ),
    _Rule(
        ("fa3", "flash", "flex"),
        lambda kind: kind.head_dim != kind.value_dim,
        "Values must be as wide as keys, and they are {kind.value_dim} and {kind.head_dim} wide",
        "Use backend 'efficient' or 'math'",
    ),
    _Rule(
        ("flash",),
        lambda kind: kind.device == "cuda" and (kind.window or kind.documents) and kind.head_dim % 8 != 0,
        "With a window or documents the head dimension must be divisible by 8, and it is {kind.head_dim}",
        "Use backend 'flex', or widen the heads",
    ),
    _Rule(
        ("fa3", "fa4"),
        lambda kind: kind.head_dim % 8 != 0 or kind.value_dim % 8 != 0 or max(kind.head_dim, kind.value_dim) > 256,
        "Head dimensions must be divisible by 8 and at most 256, and they are {kind.head_dim} and {kind.value_dim}",
        "Use backend 'flash' or 'efficient'",
    ),
    _Rule(
        ("fa3",),
        lambda _: _major() != 9,
        "It is written for Hopper (compute capability 9.0), and this device is another",
        "Use backend 'fa4', 'cudnn' or 'flash'",
    ),
    _Rule(
        ("fa4",),
        lambda kind: not (9 if kind.trains else 8) <= _major() <= 12,
        "It needs a device of compute capability 9.0 to 12.x (8.x without gradients), and this one is another",
        "Use backend 'flash', or 'cudnn'",
    ),
    _Rule(
        ("fa4",),
        lambda kind: (
            _major() in (10, 11)
            and max(kind.head_dim, kind.value_dim) > 128
            and (kind.head_dim, kind.value_dim) not in ((192, 128), (256, 256))
        ),
        "On this device it takes heads up to 128 wide, (192, 128) and (256, 256), not"
        " ({kind.head_dim}, {kind.value_dim})",
        "Use backend 'cudnn' or 'flash'",
    ),
    _Rule(
        ("fa4",),
        lambda kind: kind.softcap and kind.trains and (_major() == 12 or (_major() != 9 and kind.head_dim == 256)),
        "On this device it has no gradient of softcap",
        "Use backend 'flex', or leave softcap out",
    ),
)


def refusal(backend: KernelName, kind: Kind) -> tuple[str, str] | None:
    """Return why ``backend`` does not support ``kind`` and what to do instead, or None if it does."""
    return next(_refusals(backend, kind), None)


@cache
def check(backend: KernelName, kind: Kind) -> None:
    """Raise if ``backend`` does not support ``kind``; load its package, so that a broken one raises here.

    Raises:
        ValueError: If the backend does not support it.
        ModuleNotFoundError: If its package is missing.
        ImportError: If its package cannot be loaded.
    """
    if found := next(_refusals(backend, kind, packages=False), None):
        why, cure = found
        raise ValueError(f"Attention backend {backend!r} cannot be used here. {why}. {cure}.")
    if backend == "fa3":
        load_fa3(feature="Attention by backend 'fa3'")
    elif backend == "fa4":
        load_fa4(feature="Attention by backend 'fa4'")


def _refusals(backend: KernelName, kind: Kind, *, packages: bool = True) -> Iterator[tuple[str, str]]:
    for rule in _RULES:
        if backend in rule.backends and rule.broken(kind):
            yield rule.why.format(kind=kind), rule.cure
    if packages and (missing := missing_package(backend)):
        yield missing, "Install it for this torch and CUDA: pip install 'flash-attn-4>=4.0.0b1'"
    if kind.device == "cuda" and backend in ("cudnn", "flash", "efficient"):
        heads = (kind.heads, kind.heads if backend == "efficient" else kind.kv_heads)
        reason = _torch_refuses(
            backend, kind.dtype, heads, (kind.head_dim, kind.value_dim), kind.causal and kind.square, kind.trains
        )
        if reason:
            yield f"Torch refuses it: {reason}", "Use another backend, or 'auto'"


@cache
def _torch_refuses(
    backend: KernelName,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    causal: bool,  # noqa: FBT001
    trains: bool,  # noqa: FBT001
) -> str | None:
    name = cast('Literal["cudnn", "flash", "efficient"]', backend)
    return torch_refuses(name, dtype=dtype, heads=heads, head_dims=head_dims, causal=causal, trains=trains)
