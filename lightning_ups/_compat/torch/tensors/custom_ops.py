"""Custom operators, like `torch.library.custom_op` with less Python overhead per call.

If a model computes little, the host limits its speed, and much of the cost of a `custom_op` call is its generality:
defaults, keyword arguments, outputs that may alias inputs. Operators defined here have none of that: all tensors and
constants are positional and required, and outputs are new tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, in_torch_func

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
    """Register ``function`` as the operator ``lightning_ups::NAME``, and return the operator.

    Args:
        function: The implementation for all devices. All its arguments are positional, annotated and without defaults,
            and it returns new tensors.
        name: The name of the operator.
        fake: Returns empty outputs for fake tensors.
        keep: Called with a context, the inputs and the output, to save what the gradient needs.
        differentiate: Called with that context and the gradients of the outputs; returns a gradient, or None, for each
            input. Without it, backward raises.
        instead: The advice in the error if there is no such gradient.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator: OpOverload = getattr(torch.ops.lightning_ups, name).default
    # Between two graphs Dynamo would trace the operator's code.
    _LIBRARY.impl(name, hidden_from_dynamo(function), "CompositeExplicitAutograd")
    _LIBRARY.impl(
        name, hidden_from_dynamo(_recorded(operator, keep, differentiate, instead)), "Autograd", with_keyset=True
    )
    torch.library.register_fake(f"lightning_ups::{name}", fake, lib=_LIBRARY)
    return operator


def seen_by_nothing(*tensors: Tensor | None) -> bool:
    """Return whether an operator on ``tensors`` would only run its kernel, without gradient, mode, trace or profiler.

    A gradient may then call the kernel directly. Autograd's thread starts with cold caches, so the dispatcher and four
    Python functions cost several times more there than elsewhere.
    """
    return (
        all(tensor is None or _is_plain(tensor) for tensor in tensors)
        and not torch.is_grad_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.autograd._profiler_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
    )


def _is_plain(tensor: Tensor) -> bool:
    # A gradient of torch.autograd.grad(is_grads_batched=True) looks like a tensor, but no kernel can read it.
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
                    f"{operator} has no gradient, because it computes a gradient itself."
                    f" Leave create_graph=True out, or {instead}."
                )
            return None, *differentiate(ctx, *grads)

    Recorded.__name__ = Recorded.__qualname__ = operator._opname  # names of a graph's nodes

    def run(keyset: Any, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
            raise RuntimeError(
                f"{operator} has no derivative in forward mode, as in jvp, jacfwd or with dual tensors."
                f" Use backward, or {instead}."
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if in_torch_func():
                raise RuntimeError(
                    f"{operator} has no gradient for torch.func, as in grad, vjp or jacrev."
                    f" Use backward or torch.autograd.grad, or {instead}."
                )
            return Recorded.apply(keyset, *inputs)
        return compute(keyset, inputs)

    return run


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value, level=0).tangent is not None
