"""Operators of ours: `torch.library.custom_op` with less Python at each call.

Where there is little to compute the host decides how fast a model trains, and a good part of what an operator of
`custom_op` takes there is its generality: defaults, arguments by name, outputs that may alias inputs. What is defined
here has none of that: tensors and constants come by position, always all of them, and outputs are new tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, in_torch_func

__all__ = ["define_operator", "seen_by_nothing"]

_LIBRARY = torch.library.Library("lightning_ups", "FRAGMENT")


def define_operator(
    function: Callable[..., Any],
    *,
    name: str,
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    differentiate: Callable[..., tuple[Any, ...]] | None = None,
    instead: str = "compute this part by torch's own operators",
) -> OpOverload:
    """Make ``function`` an operator of torch, ``lightning_ups::NAME``, and return that.

    Args:
        function: What computes it, on every device. All its arguments are positional, annotated and without defaults,
            and what it returns are new tensors.
        name: What torch calls it.
        fake: Returns what ``function`` does, empty, for tensors without values.
        keep: Called with a context, the inputs and the output, to keep what the gradient needs.
        differentiate: Called with that context and the gradients of the outputs; returns a gradient, or None, for
            each input. Without it there is none, and backward raises.
        instead: What an error advises if there is no such gradient.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator: OpOverload = getattr(torch.ops.lightning_ups, name).default
    # Between two graphs Dynamo would trace what an operator runs.
    _LIBRARY.impl(name, hidden_from_dynamo(function), "CompositeExplicitAutograd")
    _LIBRARY.impl(
        name, hidden_from_dynamo(_recorded(operator, keep, differentiate, instead)), "Autograd", with_keyset=True
    )
    torch.library.register_fake(f"lightning_ups::{name}", fake, lib=_LIBRARY)
    return operator


def seen_by_nothing(*tensors: Tensor | None) -> bool:
    """Return whether an operator on ``tensors`` would only run its kernel: no gradient, mode, trace or profile sees it.

    Then a gradient may call the kernel itself. Autograd's thread has slept and comes to everything cold, so that a
    dispatcher and four functions of Python cost there several times what they cost elsewhere.
    """
    return (
        all(tensor is None or _is_plain(tensor) for tensor in tensors)
        and not torch.is_grad_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.autograd._profiler_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
    )


def _is_plain(tensor: Tensor) -> bool:
    # What torch.autograd.grad(is_grads_batched=True) hands on looks like a tensor, and no kernel can read it.
    batched = torch._C._functorch.is_legacy_batchedtensor(tensor)  # type: ignore[attr-defined]
    return type(tensor) is Tensor and not tensor.is_meta and not batched


def _recorded(
    operator: OpOverload,
    keep: Callable[..., None] | None,
    differentiate: Callable[..., tuple[Any, ...]] | None,
    instead: str,
) -> Callable[..., Any]:
    def compute(keyset: Any, inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *inputs: Any) -> Any:
            output = compute(keyset, inputs)
            if keep is not None:
                keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            if differentiate is None:
                raise RuntimeError(
                    f"A gradient through {operator} was asked for, and it has none."
                    " It is a gradient itself, computed by a kernel whose own gradient nobody has written."
                    f" Leave create_graph=True out, or {instead}."
                )
            return None, *differentiate(ctx, *grads)

    Recorded.__name__ = Recorded.__qualname__ = operator._opname  # which a graph's nodes are named by

    def run(keyset: Any, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
            raise RuntimeError(
                f"A derivative through {operator} was asked for in forward mode, by jvp, jacfwd or a dual tensor."
                " It has a gradient for backward alone, and would go on as if it hung on nothing."
                f" Use backward, or {instead}."
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if in_torch_func():
                raise RuntimeError(
                    f"A gradient through {operator} was asked for by torch.func: grad, vjp, jacrev or the like."
                    " It is an operator of ours, whose gradient backward knows and torch.func does not."
                    f" Use backward or torch.autograd.grad, or {instead}."
                )
            return Recorded.apply(keyset, *inputs)
        return compute(keyset, inputs)

    return run


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value, level=0).tangent is not None
