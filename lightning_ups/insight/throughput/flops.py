"""Counting floating-point operations: of a call as it runs, or of a module without running it."""
# ruff: noqa: ARG001 (a formula is given all that its operator is)

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_ups._compat.torch.flop_counter import RecomputeCounter
from lightning_ups._compat.torch.tensors.attention import FakeTensor, attention_operators
from lightning_ups.kernels.attention.operator import attention_forward
from lightning_ups.kernels.attention.request import attended_pairs

__all__ = ["Counted", "FlopCount", "count_flops", "module_flops"]

Counted = Literal["model", "kernel"]


@dataclass(frozen=True)
class FlopCount:
    """How many floating-point operations ran; a multiply-add is two.

    Args:
        total: All of them.
        by_operator: Those of each operator, by its name.
        by_module: Those of each module, those inside it included, by its name from the module that was called;
            ``Global`` is the whole.
        recomputed: Those of ``total`` that activation checkpointing made once more.
    """

    total: int
    by_operator: Mapping[str, int]
    by_module: Mapping[str, int]
    recomputed: int = 0


def count_flops(call: Callable[[], Any], *, attention: Counted = "model") -> FlopCount:
    """Run ``call`` and return what matrix products, convolutions and attention in it cost, backward passes included.

    Causal attention is half of full attention, a window and documents what they leave; by every kernel of torch, on
    CPU too, by the operators of `lightning_ups.kernels`, and on fake and meta tensors. Attention under a mask tensor is
    counted in full. What activation checkpointing computes twice is counted twice.

    Args:
        call: What is counted, such as ``lambda: model(x).sum().backward()``.
        attention: In backward, ``"model"`` counts attention as twice its forward pass, which is what MFU is defined
            by; ``"kernel"`` counts the 2.5 times that kernels do, since they compute the scores once more.

    Raises:
        ValueError: If ``attention`` is neither.
    """
    if attention not in get_args(Counted):
        raise ValueError(
            f"attention={attention!r} is no way to count."
            " MFU counts what the model needs, a kernel's speed what the kernel does."
            f" Use one of {get_args(Counted)}."
        )
    forwards = [*attention_operators("forward"), torch.ops.lightning_ups.attention_forward]
    counter = RecomputeCounter(display=False, custom_mapping=_formulas(attention), forwards=forwards)
    with counter, _FakeAttention():
        call()
    counts = counter.get_flop_counts()
    by_operator = {str(operator): count for operator, count in counts.get("Global", {}).items()}
    by_module = {name: sum(operators.values()) for name, operators in counts.items()}
    return FlopCount(counter.get_total_flops(), by_operator, by_module, counter.recomputed)


def module_flops(
    module: nn.Module, *args: Any, backward: bool = True, attention: Counted = "model", **kwargs: Any
) -> FlopCount:
    """Return what one call of ``module`` costs, without computing: on meta tensors in place of all it holds and gets.

    Args:
        module: Called, and left as it is.
        *args: What it is called with; only shapes and types matter.
        backward: Also count the backward pass, of parameters that require gradients.
        attention: As in `count_flops`.
        **kwargs: What it is called with by name.
    """
    state = {name: _on_meta(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))

    def call() -> None:
        with torch.set_grad_enabled(backward):
            result = functional_call(module, state, args, kwargs)
            floats = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if backward and floats:
                torch.autograd.backward([leaf.sum() for leaf in floats])

    return count_flops(call, attention=attention)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _formulas(attention: Counted) -> dict[Any, Callable[..., int]]:
    five_halves = attention == "kernel"
    formulas: dict[Any, Callable[..., int]] = {}
    for operator in attention_operators("forward"):
        formulas[operator] = _raw(partial(_fused_flops, operator, factor=2))
    formulas[torch.ops.aten.convolution_backward] = _raw(_convolution_backward_flops)
    for operator in attention_operators("backward"):
        formulas[operator] = _raw(partial(_fused_flops, operator, factor=5 if five_halves else 4))
    if not five_halves:
        formulas[torch.ops.lightning_ups.attention_backward] = _raw(_operator_backward_flops)
    return formulas


def _convolution_backward_flops(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,  # noqa: FBT001
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> int:
    # Each gradient costs what forward does; torch's formula leaves the groups out of that of the weight.
    positions = prod((x if transposed else grad).shape[2:])
    return (wanted[0] + wanted[1]) * 2 * grad.shape[0] * positions * weight.numel()


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    def with_tensors(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    with_tensors._get_raw = True  # type: ignore[attr-defined]  # as torch's register_flop_formula marks it
    return with_tensors


def _fused_flops(operator: Any, *args: Any, factor: int, **kwargs: Any) -> int:
    # Tensors [batch, heads, seq, dim]; `factor` products of [seq, seq] and [seq, dim].
    names = [argument.name for argument in operator.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    pairs = attended_pairs(q.shape[2], k.shape[2], causal=given.get("is_causal", False), batch=q.shape[0])
    return factor * q.shape[1] * pairs * (q.shape[3] + v.shape[3])


def _operator_backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *request: Any
) -> int:
    cu_seqlens, _, causal, window = request[:4]
    pairs = attended_pairs(
        q.shape[1], k.shape[1], causal=causal, window=window, cu_seqlens=cu_seqlens, batch=q.shape[0]
    )
    return 4 * q.shape[2] * pairs * (q.shape[3] + v.shape[3])


class _FakeAttention(TorchFunctionMode):
    """Sends attention on tensors without data to our operator: torch would take it apart, causal or not."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _counted_attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # it runs without this mode, and calls the same function
            before = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = _counted_attention
            try:
                return func(*args, **kwargs)
            finally:
                functional.scaled_dot_product_attention = before
        return func(*args, **kwargs)


def _counted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **options: Any,
) -> Tensor:
    if not 3 <= query.dim() <= 4 or not _without_data(query):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.dim() == 3:  # one head, and no dimension for it
        q, k, v = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return _counted_attention(q, k, v, is_causal=is_causal).squeeze(1)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attention_forward(q, k, v, None, q.shape[1], is_causal, 0, 0.0, 1.0, "eager")[0].transpose(1, 2)


def _without_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)
