"""Custom operators around the kernels of packages: fake outputs, gradient, FLOPs and sharding.

They are registered when this module is imported, and import a package only when they run, so the first call may be
inside ``torch.compile(fullgraph=True)``, on fake tensors, or on meta.
"""
# ruff: noqa: FBT001, ARG001 (an operator's arguments are positional)

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils.flop_counter import register_flop_formula

from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo
from lightning_ups._compat.torch.tensors.custom_ops import define_operator, seen_by_nothing
from lightning_ups._compat.torch.tensors.ops import register_costly_op
from lightning_ups.kernels.attention import flash_attention
from lightning_ups.kernels.attention.reference import Request, eager_backward, eager_forward

_KERNELS = {
    "eager": (eager_forward, eager_backward),
    "fa3": (flash_attention.fa3_forward, flash_attention.fa3_backward),
    "fa4": (flash_attention.fa4_forward, flash_attention.fa4_backward),
}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return attention [batch, seq, heads, dim] and the log-sum-exp of its scores in float32.

    The latter is [batch, heads, seq], or [heads, batch * seq] with documents. `Request` explains the arguments.
    """
    request = Request(cu_seqlens, max_seqlen, causal, window, softcap, scale)
    with _as_is(q.device.type):
        return _KERNELS[kernel][0](q, k, v, request)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    request = Request(cu_seqlens, max_seqlen, causal, window, softcap, scale)
    with _as_is(q.device.type):
        return _KERNELS[kernel][1](grad, q, k, v, out, lse, request)


def _as_is(device: str) -> AbstractContextManager[Any]:
    # Entering the autocast context takes as long as a kernel launch.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _empty_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seq, heads = q.shape[:3]
    lse_shape = (batch, heads, seq) if cu_seqlens is None else (heads, batch * seq)
    return q.new_empty(batch, seq, heads, v.shape[3]), q.new_empty(lse_shape, dtype=torch.float32)


def _empty_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.request = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad is None:
        return None, None, None, *nothing
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    backward = _unseen_backward if seen_by_nothing(grad, q, k, v, out, lse, cu_seqlens) else attention_backward
    return *backward(grad, q, k, v, out, lse, cu_seqlens, *ctx.request), *nothing


_INSTEAD = "take backend 'math' or 'reference'"
_unseen_backward = hidden_from_dynamo(_backward)
attention_backward = define_operator(_backward, name="attention_backward", fake=_empty_backward, instead=_INSTEAD)
attention_forward = define_operator(
    _forward,
    name="attention_forward",
    fake=_empty_forward,
    keep=_keep,
    differentiate=_differentiate,
    instead=_INSTEAD,
)


@register_flop_formula(torch.ops.lightning_ups.attention_forward, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *request: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * _multiply_adds(q, k, request) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.lightning_ups.attention_backward, get_raw=True)
def _backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request: Any, **_: Any
) -> int:
    # Five products instead of the forward's two: the scores again, and the gradients of the weights, v, q and k.
    return 2 * _multiply_adds(q, k, request) * (3 * q.shape[3] + 2 * v.shape[3])


def _multiply_adds(q: Tensor, k: Tensor, request: tuple[Any, ...]) -> int:
    cu_seqlens, _, causal, window = request[:4]
    batch, seq, heads, _ = q.shape
    return heads * attended_pairs(seq, k.shape[1], causal=causal, window=window, cu_seqlens=cu_seqlens, batch=batch)


def attended_pairs(
    seq_q: int, seq_k: int, *, causal: bool, window: int = 0, cu_seqlens: Tensor | None = None, batch: int = 1
) -> int:
    """Return how many query-key pairs are multiplied in ``batch`` rows; a causal triangle is half a square.

    Documents count by their true lengths if ``cu_seqlens`` has values, and as equally long ones if it is a fake or meta
    tensor.
    """
    if cu_seqlens is None:
        return batch * _row(seq_q, seq_k, causal=causal, window=window)
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type == "meta":
        documents = cu_seqlens.shape[0] - 1
        mean = batch * seq_q // documents
        return documents * _row(mean, mean, causal=causal, window=window)
    lengths = torch.diff(cu_seqlens).tolist()
    return sum(_row(length, length, causal=causal, window=window) for length in lengths)


def _row(seq_q: int, seq_k: int, *, causal: bool, window: int) -> int:
    reach = min(window, seq_k) if window else seq_k
    if causal:
        return seq_q * reach - reach * reach // 2 if seq_q == seq_k else seq_q * seq_k // 2
    if not window:
        return seq_q * seq_k
    return 2 * seq_q * reach - reach * reach


def _shardings(num_inputs: int) -> Callable[..., Any]:
    """Return shardings over whole batches or whole heads; documents cross batches, so with them only heads."""
    layouts: dict[str, Placement] = {"whole": Replicate(), "batch": Shard(0), "heads": Shard(2)}
    # Of the log-sum-exp: [batch, heads, seq], or [heads, tokens] with documents.
    lse_layouts = {"whole": Replicate(), "batch": Shard(0), "heads": Shard(1)}

    def acceptable(*arguments: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        documents = arguments[num_inputs] is not None
        rules = []
        for name, layout in layouts.items():
            if documents and name == "batch":
                continue
            lse = Shard(0) if documents and name == "heads" else lse_layouts[name]
            rest: list[Placement | None] = [Replicate() if documents else None, *(None,) * 6]
            if num_inputs == 3:
                rules.append(([layout, lse], [layout] * 3 + rest))
            else:
                rules.append(([layout] * 3, [layout] * 5 + [lse] + rest))
        return rules

    return acceptable


register_sharding(attention_forward)(_shardings(3))
register_sharding(attention_backward)(_shardings(6))

# Selective checkpointing keeps expensive operators: our forward like torch's.
register_costly_op("lightning_ups.attention_forward")
