"""Functions of torch that save other tensors for backward on a GPU than on a CPU, as they are on a GPU.

A dry run has fake CPU tensors, since a build of torch without CUDA cannot differentiate fake GPU tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

_Function = Callable[..., Any]
_STACKS: list[ExitStack] = []  # the open replacements, the outermost first


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Use the fused kernels of a GPU for functions that the CPU decomposes, and float32 for losses under autocast.

    A norm saves its input and one value per row; dropout saves its mask in bytes; attention saves queries, keys,
    values, its output and the logsumexp. The functions are replaced in the process, since a mode would be off in
    backward, where blocks are recomputed.
    """
    with _patched() as stack:
        _STACKS.append(stack)
        try:
            yield
        finally:
            _STACKS.pop()


@contextmanager
def as_on_cpu() -> Iterator[None]:
    """Restore the functions of torch while the context is open: a compiler decomposes them anyway."""
    if not _STACKS:
        yield
        return
    _STACKS[-1].close()
    try:
        yield
    finally:
        _STACKS[-1].enter_context(_patched())


@contextmanager
def _patched() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        for owner, name, replacement in _replacements():
            stack.enter_context(patch.object(owner, name, replacement))
        yield stack


def _replacements() -> Iterator[tuple[Any, str, _Function]]:
    yield F, "rms_norm", _rms_norm(F.rms_norm)
    yield torch, "rms_norm", _rms_norm(torch.rms_norm)
    yield F, "dropout", _dropout
    yield F, "scaled_dot_product_attention", _without_dropout(F.scaled_dot_product_attention, _attention_arguments)
    yield F, "multi_head_attention_forward", _without_dropout(F.multi_head_attention_forward, None)
    for owner, names in _IN_FLOAT32:
        for name in names.split():
            if hasattr(owner, name):
                yield owner, name, _in_float32(getattr(owner, name))


class _Rows(torch.autograd.Function):
    """A fused norm over the last dimension, which saves its input and one value per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(original: _Function) -> _Function:
    @wraps(original)
    def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        if len(normalized_shape) != 1 or (weight is not None and weight.dtype != input.dtype):
            return original(input, normalized_shape, weight, eps)  # decomposed on a GPU, too
        return _Rows.apply(input, weight)

    return rms_norm


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001, FBT001, FBT002
    return torch.native_dropout(input, p, True)[0] if training and p else input  # noqa: FBT003


def _attention_arguments(  # torch's function is built in and has no signature
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> None: ...


def _without_dropout(original: _Function, arguments: _Function | None) -> _Function:
    # The GPU kernel draws the dropout of attention again in backward, and saves nothing.
    known = signature(arguments or original)

    @wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        given = known.bind(*args, **kwargs)
        given.arguments["dropout_p"] = 0.0
        return original(*given.args, **given.kwargs)

    return attention


def _in_float32(original: _Function) -> _Function:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return original(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return original(*_wide(args), **_wide(kwargs))

    return function


def _wide(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.float() if tree.dtype in (torch.float16, torch.bfloat16) else tree
    if isinstance(tree, dict):
        return {key: _wide(value) for key, value in tree.items()}
    return tuple(map(_wide, tree)) if isinstance(tree, tuple) else tree


_IN_FLOAT32: tuple[tuple[Any, str], ...] = (  # by autocast on CUDA, but not on CPU
    (F, "softmax log_softmax cross_entropy nll_loss layer_norm group_norm mse_loss l1_loss smooth_l1_loss kl_div"),
    (F, "binary_cross_entropy_with_logits cosine_embedding_loss"),
    (torch, "softmax log_softmax exp pow rsqrt cumsum layer_norm"),
    (Tensor, "softmax log_softmax exp pow rsqrt cumsum"),
)


def step_as_on_cuda(optimizer: Optimizer) -> Optimizer:
    """Let ``optimizer`` use foreach, the default on a GPU."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
