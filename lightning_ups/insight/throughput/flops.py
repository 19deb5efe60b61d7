"""Counting floating-point operations: of a call as it runs, or of one training step in a dry run."""
# ruff: noqa: ARG001 (a formula gets all arguments of its operator)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.torch.fake_tensors import RecomputeCounter, has_no_data, run_backward
from lightning_ups._compat.torch.tensors.attention import attention_operators
from lightning_ups.insight.dry_run import DryRun, NotCopiedError, call_training_step, loss_in, plain_run
from lightning_ups.kernels.attention.operator import attended_pairs, attention_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Floating-point operations of one forward and backward pass.

    Args:
        model: Required by the model.
        hardware: Including what activation checkpointing recomputes.
        low_precision: The part of ``model`` in layers converted to float8.
    """

    model: int
    hardware: int
    low_precision: int = 0


def step_flops(module: nn.Module, batch: Any, *, step: Callable[[Any, Any], Any] = call_training_step) -> StepFlops:
    """Count the FLOPs of one training step and its backward pass, without running it.

    Args:
        module: Not changed. Sharded, compiled and converted modules count as the plain module.
        batch: Its shapes and dtypes matter, and the values of small integer tensors, such as lengths and masks.
        step: Called with copies of both. Returns a loss, a mapping with one, or None.

    Raises:
        NotCopiedError: If the step uses an object that cannot be copied.
        Exception: Whatever the step raises on fake tensors.
    """
    try:
        return _step_flops(module, batch, step, knows_values=True)
    except NotCopiedError:
        raise
    except Exception:  # noqa: BLE001  (a branch taken because of known values may need unknown ones)
        return _step_flops(module, batch, step, knows_values=False)


def _step_flops(module: nn.Module, batch: Any, step: Callable[[Any, Any], Any], *, knows_values: bool) -> StepFlops:
    with plain_run(module, batch, knows_values=knows_values) as dry_run:
        total, again = count_flops(lambda: _forward_backward(step, dry_run))
        return StepFlops(model=total - again, hardware=total, low_precision=dry_run.float8_flops)


def _forward_backward(step: Callable[[Any, Any], Any], dry_run: DryRun) -> None:
    loss = loss_in(step(dry_run.module, dry_run.batch))
    if loss is not None and loss.requires_grad:
        run_backward(loss)


class FlopCount(NamedTuple):
    """Floating-point operations, a multiply-add counted as two: all, and those of activation checkpointing."""

    total: int
    recomputed: int


def count_flops(call: Callable[[], Any]) -> FlopCount:
    """Run ``call`` and count its matrix products, convolutions and attention, backward passes included.

    Attention counts by the pairs that causality, windows and documents leave, by every kernel, and in backward as twice
    its forward pass, as MFU is defined. With a mask tensor it counts in full.

    Args:
        call: Such as ``lambda: model(x).sum().backward()``.
    """
    forwards = [*attention_operators("forward"), torch.ops.lightning_ups.attention_forward]
    counter = RecomputeCounter(display=False, custom_mapping=_formulas(), forwards=forwards)
    with counter, _AttentionWithoutData():
        call()
    return FlopCount(counter.get_total_flops(), counter.recomputed)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten.convolution_backward: _with_tensors(_convolution_backward_flops),
        torch.ops.lightning_ups.attention_backward: _with_tensors(_operator_backward_flops),
    }
    for operator in attention_operators("forward"):
        formulas[operator] = _with_tensors(partial(_attention_flops, operator, factor=2))
    for operator in attention_operators("backward"):
        formulas[operator] = _with_tensors(partial(_attention_flops, operator, factor=4))
    return formulas


def _with_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    def called_with_tensors(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    called_with_tensors._get_raw = True  # type: ignore[attr-defined]  # as torch's register_flop_formula marks it
    return called_with_tensors


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
    # Each gradient costs as much as forward. torch's formula ignores the groups for the gradient of the weight.
    positions = prod((x if transposed else grad).shape[2:])
    return (wanted[0] + wanted[1]) * 2 * grad.shape[0] * positions * weight.numel()


def _attention_flops(operator: Any, *args: Any, factor: int, **kwargs: Any) -> int:
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


class _AttentionWithoutData(TorchFunctionMode):
    """Sends attention on tensors without data to our operator: torch would decompose it and lose its causality."""

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
    if not 3 <= query.dim() <= 4 or not has_no_data(query):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if query.dim() == 3:  # without a head dimension
        q, k, v = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return _counted_attention(q, k, v, is_causal=is_causal).squeeze(1)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attention_forward(q, k, v, None, q.shape[1], is_causal, 0, 0.0, 1.0, "eager")[0].transpose(1, 2)
