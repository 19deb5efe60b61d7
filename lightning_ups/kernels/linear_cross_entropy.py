"""The loss of a language model from its hidden states and its head's weight, without all logits in memory.

Logits of some rows at a time (a chunk) are computed, turned into their gradient, and multiplied into the gradients of
hidden states and weight at once, in the forward pass. The logits are thus computed once, as without chunks, and what
waits for backward is one gradient of each, which backward needs memory for in any case. Computing them again in
backward would cost a third more operations of the head; only ``reduction="none"`` does, since there each row's
gradient has a factor that is not known before.

All of it is one operator, even in a compiled function: were it traced, the partitioner would put the gradients into
the backward graph and keep every logit for them. On a GPU the operator compiles the step between the products.

N rows, D width of the model, V vocabulary, C rows of a chunk.
"""
# ruff: noqa: N803, N806, N815, FBT001, ARG001 (shape suffixes are capitals; an operator's arguments are positional)

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula

from lightning_ups._compat.optional import has
from lightning_ups._compat.products import add_product, product

__all__ = ["Backend", "Reduction", "linear_cross_entropy", "reference_linear_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "chunked", "torch", "reference"]

# Elements of a chunk's logits. More rows make the weight's gradient, which each chunk reads and writes, cost less; on a
# GPU 4096 rows of a vocabulary of 128256 fit, in 2 GiB of float32 and 1 GiB of gradient.
_CHUNK_ELEMENTS = {"cuda": 1 << 29}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 24
_ROWS_MULTIPLE = 128


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk: int | Literal["auto"] = "auto",
    backend: Backend = "auto",
) -> Tensor:
    """Return the cross-entropy of ``hidden @ weight.T`` in float32; `reference_linear_cross_entropy` specifies it.

    Products run in the type of ``hidden`` and ``weight``, or autocast's, and sum in float32; logits, their softmax and
    the sum of the weight's gradient over chunks are float32.

    Args:
        hidden: [..., dim], what the head would be given.
        weight: [vocab, dim], the head's weight; whole: call this inside the forward of the module that owns it where
            that is sharded.
        targets: [...] int64, the right class of each row.
        ignore_index: Rows with this target have no loss.
        z_loss: Adds so much times the squared log-sum-exp of each row's logits, which keeps them from drifting.
        softcap: Bend logits to ``softcap * tanh(logit / softcap)``.
        reduction: The mean over rows that are not ignored (not a number if all are), their sum, or each row's loss.
            With ``"none"`` backward computes the logits a second time.
        chunk: Rows whose logits are in memory at a time; ``"auto"`` takes as many as fit into 2 GiB on a GPU, and
            64 MiB elsewhere, in chunks of equal length.
        backend: ``"chunked"`` is ours, and what ``"auto"`` means: torch's sums the weight's gradient in bfloat16 unless
            told otherwise, and knows neither z-loss nor softcap. ``"torch"`` is ``F.linear_cross_entropy`` in its
            accurate policy, where this torch has it; ``"reference"`` has all logits in memory.

    Raises:
        ValueError: If the tensors do not fit together, or the backend cannot do what is asked.
        TypeError: If the weight is sharded.
    """
    _validate(hidden, weight, targets, reduction=reduction, chunk=chunk, backend=backend)
    if backend == "reference":
        return reference_linear_cross_entropy(
            hidden, weight, targets, ignore_index=ignore_index, z_loss=z_loss, softcap=softcap, reduction=reduction
        )
    if backend == "torch":
        return _by_torch(hidden, weight, targets, ignore_index, z_loss, softcap, reduction, chunk)
    hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    grad = torch.is_grad_enabled()
    loss = linear_cross_entropy_forward(
        hidden_ND,
        weight,
        targets_N,
        ignore_index,
        float(z_loss),
        float(softcap or 0.0),
        reduction,
        0 if chunk == "auto" else chunk,
        _product_dtype(hidden),
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )[0]
    return loss.view(targets.shape) if reduction == "none" else loss


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the loss with all logits in memory, in float32 at least: the specification."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        logits_NV = F.linear(hidden.to(precise), weight.to(precise)).flatten(0, -2)
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    targets_N = targets.reshape(-1)
    loss_N = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="none")
    valid_N = targets_N != ignore_index
    # Chosen and not multiplied: so a row that is ignored has no gradient even where the mean is not a number.
    loss_N = torch.where(valid_N, loss_N + z_loss * logits_NV.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss_N.view(targets.shape)
    return loss_N.sum() / valid_N.sum() if reduction == "mean" else loss_N.sum()


@torch.library.custom_op("lightning_ups::linear_cross_entropy_forward", mutates_args=())
def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    dtype: torch.dtype,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, each row's log-sum-exp, and, except with reduction "none", the gradients that are wanted."""
    valid_N = targets != ignore_index
    count = valid_N.sum().to(torch.promote_types(dtype, torch.float32))
    per_row = torch.where(valid_N, 1 / count if reduction == "mean" else torch.ones_like(count), 0.0)
    if reduction == "none":
        want_hidden = want_weight = False
    step = _Step(z_loss, softcap, want_hidden or want_weight)
    losses = _chunks(hidden, weight, targets, per_row, step, chunk, dtype, want_hidden, want_weight)
    total = losses.loss_N if reduction == "none" else losses.loss_N.sum()
    if reduction == "mean":
        total = total / count
    return total, losses.lse_N, losses.grad_hidden, losses.grad_weight


@torch.library.custom_op("lightning_ups::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight, of the losses of single rows."""
    per_row = torch.where(targets != ignore_index, grad_loss, 0.0)
    step = _Step(z_loss, softcap, gradient=True)
    losses = _chunks(hidden, weight, targets, per_row, step, chunk, dtype, want_hidden, want_weight)
    return losses.grad_hidden, losses.grad_weight


class _Step(NamedTuple):
    z_loss: float
    softcap: float
    gradient: bool


class _Losses(NamedTuple):
    loss_N: Tensor
    lse_N: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    per_row: Tensor,
    step: _Step,
    chunk: int,
    dtype: torch.dtype,
    want_hidden: bool,
    want_weight: bool,
) -> _Losses:
    precise = torch.promote_types(dtype, torch.float32)
    loss_N = torch.empty(hidden.shape[0], dtype=precise, device=hidden.device)
    lse_N = torch.empty_like(loss_N)
    grad_hidden = (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if want_hidden else hidden.new_empty(0)
    )
    total = _WeightGradient(weight, precise) if want_weight else None
    with torch.autocast(hidden.device.type, enabled=False):
        hidden_ND, weight_VD = _operand(hidden, dtype), _operand(weight, dtype)
        per_row = per_row.to(precise)
        for rows in _slices(hidden.shape[0], weight.shape[0], chunk=chunk, device=hidden.device.type):
            logits_CV = product(hidden_ND[rows], weight_VD.t(), dtype=precise)
            loss_N[rows], lse_N[rows], grad_CV = _step_function(hidden.device.type)(
                logits_CV, targets[rows], per_row[rows], *step, hidden_ND.dtype
            )
            del logits_CV
            if grad_CV is not None and want_hidden:
                grad_hidden[rows] = product(grad_CV, weight_VD, dtype=grad_hidden.dtype)
            if grad_CV is not None and total is not None:
                total.add(grad_CV, hidden_ND[rows])
    return _Losses(loss_N, lse_N, grad_hidden, weight.new_empty(0) if total is None else total.result())


def _gradient_step(
    logits_CV: Tensor,
    targets_C: Tensor,
    per_row_C: Tensor,
    z_loss: float,
    softcap: float,
    gradient: bool,
    dtype: torch.dtype,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return loss and log-sum-exp of each row, and the gradient of the logits times ``per_row_C``, in ``dtype``."""
    out = logits_CV if in_place else None
    if softcap:
        logits_CV = torch.mul(torch.tanh(torch.div(logits_CV, softcap, out=out), out=out), softcap, out=out)
    lse_C = logits_CV.logsumexp(-1)
    counted_C = per_row_C != 0
    at_C1 = torch.where(counted_C, targets_C, 0).unsqueeze(1)
    right_C = logits_CV.gather(1, at_C1).squeeze(1)
    loss_C = torch.where(counted_C, lse_C - right_C + z_loss * lse_C.square(), 0.0)
    if not gradient:
        return loss_C, lse_C, None
    factor_C = (1 + 2 * z_loss * lse_C) * per_row_C
    slope_CV = 1 - (logits_CV / softcap).square() if softcap else None
    right_slope_C = 1 - (right_C / softcap).square() if softcap else 1.0
    grad_CV = torch.exp(torch.sub(logits_CV, lse_C.unsqueeze(1), out=out), out=out)
    grad_CV = torch.mul(grad_CV, factor_C.unsqueeze(1), out=out)
    if slope_CV is not None:
        grad_CV = torch.mul(grad_CV, slope_CV, out=out)
    # The right class apart, in full precision and after rounding: one pass over the logits less than adding to them.
    right_grad_C = ((right_C - lse_C).exp() * factor_C - per_row_C) * right_slope_C
    grad_CV = grad_CV.to(dtype)
    return loss_C, lse_C, grad_CV.scatter_(1, at_C1, right_grad_C.to(dtype).unsqueeze(1))


@cache
def _step_function(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    if device == "cuda" and has("triton"):
        return torch.compile(_gradient_step)  # a pass or two over the logits where eager has ten

    def in_place(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return _gradient_step(*arguments, in_place=True)

    return in_place


class _WeightGradient:
    """The sum over chunks of the weight's gradient, in float32."""

    def __init__(self, weight: Tensor, precise: torch.dtype) -> None:
        self._weight = weight
        self._total = torch.empty(weight.shape, dtype=precise, device=weight.device)
        self._empty = True

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        if self._empty:
            product(grad_CV.t(), hidden_CD, dtype=self._total.dtype, out=self._total)
        else:
            add_product(self._total, grad_CV.t(), hidden_CD)
        self._empty = False

    def result(self) -> Tensor:
        return self._total.zero_().to(self._weight.dtype) if self._empty else self._total.to(self._weight.dtype)


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # CPUs cannot sum products of halves in float32, so there they are widened after rounding.
    tensor = tensor.to(dtype)
    return tensor if tensor.is_cuda else tensor.to(torch.promote_types(dtype, torch.float32))


def _slices(num_rows: int, vocab: int, *, chunk: int, device: str) -> Iterator[slice]:
    if not chunk:
        fit = max(_CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS_ELSEWHERE) // vocab, 1)
        even = -(-num_rows // -(-num_rows // fit)) if num_rows else 1
        chunk = -(-even // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))


@linear_cross_entropy_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    dtype: torch.dtype,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = hidden.shape[0]
    precise = torch.promote_types(dtype, torch.float32)
    grads = reduction != "none"
    return (
        hidden.new_empty((num_rows,) if reduction == "none" else (), dtype=precise),
        hidden.new_empty(num_rows, dtype=precise),
        hidden.new_empty(hidden.shape) if want_hidden and grads else hidden.new_empty(0),
        weight.new_empty(weight.shape) if want_weight and grads else weight.new_empty(0),
    )


@linear_cross_entropy_backward.register_fake
def _(grad_loss: Tensor, hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    want_hidden, want_weight = options[-2:]
    return (
        hidden.new_empty(hidden.shape if want_hidden else 0),
        weight.new_empty(weight.shape if want_weight else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ignore_index, z_loss, softcap, ctx.reduction, chunk, dtype, *ctx.want = inputs
    _, lse, *grads = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, *grads)
    if ctx.reduction == "none":
        ctx.options = (ignore_index, z_loss, softcap, chunk, dtype)
        ctx.save_for_backward(hidden, weight, targets)
    else:
        ctx.save_for_backward(*grads)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if grad is None:
        return None, None, *nothing
    if ctx.reduction == "none":
        grads = linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options, *ctx.want)
    else:
        grads = tuple(_scaled(saved, grad) for saved in _saved_once(ctx))
    return *(g if want else None for g, want in zip(grads, ctx.want, strict=True)), *nothing


def _saved_once(ctx: Any) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "linear_cross_entropy was differentiated twice."
            " Its gradients are computed in the forward pass and scaled where they are, so that the weight's is in"
            " memory once."
            " Call backward once, or use backend='reference' for a second time."
        ) from error


def _scaled(saved: Tensor, grad: Tensor) -> Tensor:
    # In place where nobody traces; a compiled backward does as well by itself.
    return saved.mul_(grad) if type(saved) is Tensor and type(grad) is Tensor else saved * grad


linear_cross_entropy_forward.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.lightning_ups.linear_cross_entropy_forward, get_raw=True)
def _forward_flops(hidden: Tensor, weight: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    want_hidden, want_weight = options[-2:] if options[4] != "none" else (False, False)
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


@register_flop_formula(torch.ops.lightning_ups.linear_cross_entropy_backward, get_raw=True)
def _backward_flops(grad: Tensor, hidden: Tensor, weight: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    want_hidden, want_weight = options[-2:]
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _by_torch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    reduction: Reduction,
    chunk: int | Literal["auto"],
) -> Tensor:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None or z_loss or softcap:
        why = "this torch has no F.linear_cross_entropy" if options is None else "it knows neither z_loss nor softcap"
        raise ValueError(
            f"linear_cross_entropy(backend='torch') was asked for, and {why}."
            " A backend that is named does what is asked or stops."
            " Use backend='chunked'."
        )
    dtype = _product_dtype(hidden)
    policy: dict[str, Any] = {"acc_policy": "accurate"}
    if chunk != "auto":
        policy |= {"batch_chunk_size": chunk, "chunking_method": None}
    loss = F.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight.to(dtype),
        targets.reshape(-1),
        reduction=reduction,
        ignore_index=ignore_index,
        options=options(**policy),
    ).float()
    return loss.view(targets.shape) if reduction == "none" else loss


def _validate(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str, chunk: int | str, backend: str
) -> None:
    if isinstance(weight, DTensor) or isinstance(hidden, DTensor):
        raise TypeError(
            "linear_cross_entropy was given a DTensor, a part of what is sharded over devices."
            " It needs all classes of each row."
            " Call it in the forward of the module that owns the weight, where that is gathered, or pass"
            " weight.full_tensor(); with a head parallel over the vocabulary use torch's loss_parallel."
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"linear_cross_entropy was given hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets"
            f" {tuple(targets.shape)}."
            " They are [..., dim], [vocab, dim] and [...]."
            " Pass the weight of nn.Linear as it is, and one class for each row of hidden."
        )
    for name, value, known in (("reduction", reduction, Reduction), ("backend", backend, Backend)):
        if value not in get_args(known):
            raise ValueError(
                f"linear_cross_entropy({name}={value!r}) is not known."
                " It says how the rows' losses are put together, or by what they are computed."
                f" Use one of {get_args(known)}."
            )
    if chunk != "auto" and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(
            f"linear_cross_entropy(chunk={chunk!r}) is no number of rows."
            " So many rows' logits are in memory at a time."
            " Use a positive number, or 'auto'."
        )
