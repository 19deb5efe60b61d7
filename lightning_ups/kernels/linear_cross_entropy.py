"""The loss of a language model from its hidden states and its head's weight, without all logits in memory.

The forward pass processes the rows in chunks: it computes a chunk's logits, turns them into their gradient, and
multiplies that into the gradients of hidden states and weight. The logits are therefore computed once, as without
chunks, and only these two gradients are kept for backward, which needs memory for them anyway. Recomputing the logits
in backward would cost a third more FLOPs of the head; only ``reduction="none"`` does, because the factor of each row's
gradient is not known before.

A chunk's memory holds the gradient of its logits, in the dtype of the products: the longer the chunk, the less often
the sum of the weight's gradient is read and written. Logits are rounded to that dtype, as a head's are, and their
gradient replaces them. Float32 logits would take twice the memory, so they exist for an eighth of the chunk at a time,
with a product for each.

Everything is one operator, even in a compiled function: if it were traced, the partitioner would move the gradients to
the backward graph and keep every logit for them. The step between the products is one kernel on a GPU.

N rows, D model dimension, V vocabulary size, C rows of a chunk.
"""
# ruff: noqa: N803, N806, FBT001, ARG001 (shape suffixes are capitals; an operator's arguments are positional)

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula

from lightning_ups._compat.torch.tensors.autograd import in_torch_func, storages, without_autocast
from lightning_ups._compat.torch.tensors.custom_ops import define_operator
from lightning_ups._compat.torch.tensors.tensors import product
from lightning_ups.kernels.cross_entropy_step import Settings, reference_step, step_on
from lightning_ups.kernels.weight_gradient import WeightGradient

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "chunked", "torch", "reference"]

_ROWS_MULTIPLE = 128
_LEAST_ROWS, _MOST_ROWS = 2048, 4096  # of a chunk; an eighth of all rows is always allowed
_LOGITS_SHARE, _LEAST_LOGITS_ROWS = 8, 512  # of a chunk, if its logits have another dtype than their gradient
_COLUMNS_MULTIPLE = 64  # so that a row begins where a matrix product can read whole lines, for any vocabulary size
_ELEMENTS_ELSEWHERE = 1 << 24  # of a chunk on other devices than GPUs: 64 MiB


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    round_logits: bool = True,
    reduction: Reduction = "mean",
    chunk: int | Literal["auto"] = "auto",
    backend: Backend = "auto",
) -> Tensor:
    """Return the cross-entropy of ``hidden @ weight.T`` in float32, as specified by `reference_linear_cross_entropy`.

    Products use the dtype of ``hidden`` and ``weight``, the narrower of the two, or autocast's, and accumulate in
    float32. Logits are rounded to that dtype, as a head's are; their softmax, and the sum of the weight's gradient over
    chunks, are float32.

    Args:
        hidden: [..., dim], the input of the head.
        weight: [vocab, dim], the head's weight, unsharded: under sharding, call this inside the forward of the module
            that owns the weight.
        targets: [...] integers, the target class of each row.
        ignore_index: Rows with this target have no loss.
        z_loss: The factor of the squared log-sum-exp of each row's logits that is added to the loss, against drift.
        softcap: Logits become ``softcap * tanh(logit / softcap)``.
        round_logits: Round logits to the dtype of the products, as a head does. bfloat16 changes each by up to a 512th
            of itself, and a row's loss by up to a 256th of its largest logit; float32 products do not round. False
            keeps logits in float32, which needs more memory and bandwidth.
        reduction: ``"mean"`` over rows that are not ignored (NaN if all are), ``"sum"``, or ``"none"``: each row's
            loss. With ``"none"`` backward computes the logits a second time.
        chunk: The number of rows whose logits' gradient is in memory at a time. Rounded logits are replaced by their
            gradient; float32 logits exist for an eighth of the rows, but at least 512. ``"auto"`` takes a quarter of
            all rows, but at least 2048 and at most 4096 or an eighth, whichever is more, in chunks of equal length. In
            bfloat16 on a GPU, a chunk takes 2 bytes per logit (2.5 with float32 logits, or 3 in a chunk of 2048), plus
            4 per element of the weight, instead of 2 per logit of all rows and 2 per element; all rows are one chunk if
            that takes no more. On other devices, a chunk's logits take at most 64 MiB.
        backend: ``"chunked"`` is this implementation, and the meaning of ``"auto"``: torch's sums the weight's gradient
            in bfloat16 by default, and has neither z-loss nor softcap. ``"torch"`` is ``F.linear_cross_entropy`` in its
            accurate policy, if this torch has it, with float32 logits: for half-precision inputs, set
            ``round_logits=False``. ``"reference"`` has all logits in memory.

    Raises:
        ValueError: If shapes do not match, or the backend does not support the arguments.
        TypeError: If the weight is sharded, the targets are not integers, or ``z_loss`` or ``softcap`` is a tensor.
    """
    _validate(hidden, weight, targets)
    _validate_options(reduction=reduction, chunk=chunk, backend=backend, z_loss=z_loss, softcap=softcap)
    targets = targets.long()  # in uint8, 156 would equal -100
    if backend == "reference":
        return reference_linear_cross_entropy(
            hidden,
            weight,
            targets,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
            round_logits=round_logits,
            reduction=reduction,
        )
    if backend == "torch":
        return _by_torch(hidden, weight, targets, ignore_index, z_loss, softcap, round_logits, reduction, chunk)
    hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    grad = torch.is_grad_enabled()
    # Tensors inside vmap do not show whether the tensors behind them require a gradient.
    batched = not torch.compiler.is_compiling() and in_torch_func()
    loss = linear_cross_entropy_forward(
        hidden_ND,
        weight,
        targets_N,
        ignore_index,
        float(z_loss),
        float(softcap or 0.0),
        reduction,
        0 if chunk == "auto" else chunk,
        _product_dtype(hidden, weight),
        round_logits,
        grad and (batched or hidden.requires_grad),
        grad and (batched or weight.requires_grad),
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
    round_logits: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the loss with all logits in memory, at least in float32: the specification."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    with without_autocast(hidden.device.type):
        logits_NV = F.linear(hidden.to(precise).reshape(-1, hidden.shape[-1]), weight.to(precise))
    if round_logits:
        logits_NV = logits_NV.to(_product_dtype(hidden, weight)).to(precise)
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    targets_N = targets.long().reshape(-1)
    loss_N = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="none")
    valid_N = targets_N != ignore_index
    # Selected, not multiplied: an ignored row has no gradient even if the mean is NaN.
    loss_N = torch.where(valid_N, loss_N + z_loss * logits_NV.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss_N.view(targets.shape)
    return loss_N.sum() / valid_N.sum() if reduction == "mean" else loss_N.sum()


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    dtype: torch.dtype,
    round_logits: bool,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and, except with reduction "none", the required gradients, times `_lift`."""
    valid_N = targets != ignore_index
    count = valid_N.sum().to(torch.promote_types(dtype, torch.float32))
    lift = _lift(hidden, weight, dtype, reduction)
    per_row = torch.where(valid_N, lift / count if reduction == "mean" else torch.ones_like(count), 0.0)
    want = reduction != "none" and want_hidden, reduction != "none" and want_weight
    found = _chunks(hidden, weight, targets, per_row, Settings(z_loss, softcap), chunk, dtype, round_logits, want)
    total = found.losses if reduction == "none" else found.losses.sum()
    if reduction == "mean":
        total = total / count
    return total, found.grad_hidden, found.grad_weight


def _backward(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    round_logits: bool,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and weight, given those of each row's loss."""
    per_row = torch.where(targets != ignore_index, grad_loss, 0.0)
    want = want_hidden, want_weight
    found = _chunks(hidden, weight, targets, per_row, Settings(z_loss, softcap), chunk, dtype, round_logits, want)
    return found.grad_hidden, found.grad_weight


class _Losses(NamedTuple):
    losses: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    per_row: Tensor,
    settings: Settings,
    chunk: int,
    dtype: torch.dtype,
    round_logits: bool,
    want: tuple[bool, bool],
) -> _Losses:
    want_hidden, want_weight = want
    num_rows, precise = len(hidden), torch.promote_types(dtype, torch.float32)
    loss_N = torch.empty(num_rows, dtype=precise, device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if want_hidden else 0)
    total = None
    with torch.autocast(hidden.device.type, enabled=False):
        hidden_ND, weight_VD, per_row = _operand(hidden, dtype), _operand(weight, dtype), per_row.to(precise)
        chunk = min(chunk or auto_rows(num_rows, weight, dtype=hidden_ND.dtype), num_rows)
        memory = _Memory(chunk, weight_VD, dtype if round_logits else precise, precise, gradient=any(want))
        if want_weight:
            total = WeightGradient(weight, precise, once=chunk == num_rows, lean=memory.nbytes < weight.nbytes)
        for rows in _slices(num_rows, chunk):
            grad_CV = memory.fill(hidden_ND[rows], weight_VD, targets[rows], per_row[rows], loss_N[rows], settings)
            if grad_CV is not None and want_hidden:
                product(grad_CV, weight_VD, dtype=grad_hidden.dtype, out=grad_hidden[rows])
            if grad_CV is not None and total is not None:
                total.add(grad_CV, hidden_ND[rows])
            del grad_CV
        del memory  # before the sum is copied to the weight's dtype
    return _Losses(loss_N, grad_hidden, weight.new_empty(0) if total is None else total.take())


class _Memory:
    """The memory of a chunk's logits and their gradient, reused for each chunk."""

    def __init__(
        self, rows: int, weight_VD: Tensor, rounded_to: torch.dtype, precise: torch.dtype, *, gradient: bool
    ) -> None:
        held, vocab = weight_VD.dtype, len(weight_VD)
        device = weight_VD.device
        self._step = step_on(device.type, precise)
        self._rounded_to = rounded_to
        logits_type = held if rounded_to != precise else precise
        one_memory = gradient and logits_type == held
        whole = one_memory and (held == precise or self._step is not reference_step)
        self._rows_at_once = (
            rows if whole else min(max(_up(rows // _LOGITS_SHARE, _ROWS_MULTIPLE), _LEAST_LOGITS_ROWS), rows)
        )
        stride = _up(vocab, _COLUMNS_MULTIPLE)

        def matrix(rows: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((rows, stride), dtype=dtype, device=device)[:, :vocab]

        self._gradient = matrix(rows, held) if gradient else None
        self._logits = None if one_memory else matrix(self._rows_at_once, logits_type)

    @property
    def nbytes(self) -> int:
        """The size of this memory."""
        parts = (self._gradient, self._logits)
        return sum(part.untyped_storage().nbytes() for part in parts if part is not None)

    def fill(
        self,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        targets_C: Tensor,
        per_row_C: Tensor,
        loss_C: Tensor,
        settings: Settings,
    ) -> Tensor | None:
        """Write the losses; return the gradient of the logits, times ``per_row_C``, if required."""
        for rows in _slices(len(hidden_CD), self._rows_at_once):
            gradient = None if self._gradient is None else self._gradient[rows]
            logits = self._logits[: len(hidden_CD[rows])] if self._logits is not None else gradient
            assert logits is not None
            product(hidden_CD[rows], weight_VD.t(), dtype=logits.dtype, out=logits)
            if self._rounded_to.itemsize < logits.dtype.itemsize:  # a CPU computes halves in float32
                logits.copy_(logits.to(self._rounded_to))
            self._step(logits, gradient, targets_C[rows], per_row_C[rows], loss_C[rows], settings)
        return None if self._gradient is None else self._gradient[: len(hidden_CD)]


def _lift(hidden: Tensor, weight: Tensor, dtype: torch.dtype, reduction: str) -> int:
    # A mean's gradients are too small for float16, and the loss scale is only known in backward: until then they are as
    # large as a sum's. Not for float16 weights, whose sum over rows soon overflows.
    low = dtype == torch.float16 != weight.dtype
    return hidden.shape[0] + 1 if reduction == "mean" and low else 1


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # CPUs cannot accumulate products of halves in float32, so they are converted after rounding.
    tensor = tensor.to(dtype)
    return tensor if tensor.is_cuda else tensor.to(torch.promote_types(dtype, torch.float32))


def auto_rows(num_rows: int, weight: Tensor, *, dtype: torch.dtype) -> int:
    """Return the rows of a chunk for ``chunk="auto"``, with products in ``dtype``."""
    vocab, dim = weight.shape
    most = max(min(num_rows // 4, _MOST_ROWS), num_rows // 8, _LEAST_ROWS)
    if not weight.is_cuda:
        most = min(most, max(_ELEMENTS_ELSEWHERE // vocab, 1))
    # One chunk needs no float32 sum besides the result, but more logits.
    sum_in_logits = dim * (torch.promote_types(dtype, torch.float32).itemsize - weight.dtype.itemsize) // dtype.itemsize
    if weight.is_cuda and num_rows - most <= sum_in_logits:
        most = max(num_rows, 1)
    num_chunks = max(-(-num_rows // most), 1)
    return _up(max(-(-num_rows // num_chunks), 1), _ROWS_MULTIPLE)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _slices(num_rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_rows, max(chunk, 1)):
        yield slice(start, min(start + chunk, num_rows))


def _empty_forward(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, reduction, _, dtype, _, want_hidden, want_weight = options
    return (
        hidden.new_empty(
            hidden.shape[:1] if reduction == "none" else (), dtype=torch.promote_types(dtype, torch.float32)
        ),
        hidden.new_empty(hidden.shape if want_hidden and reduction != "none" else 0),
        weight.new_empty(weight.shape if want_weight and reduction != "none" else 0),
    )


def _empty_backward(grad_loss: Tensor, hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    want_hidden, want_weight = options[-2:]
    return (
        hidden.new_empty(hidden.shape if want_hidden else 0),
        weight.new_empty(weight.shape if want_weight else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ignore_index, z_loss, softcap, ctx.reduction, *how, want_hidden, want_weight = inputs
    ctx.want = want_hidden, want_weight
    ctx.lift = _lift(hidden, weight, how[1], ctx.reduction)
    _, *grads = output
    ctx.scaled = set()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*grads)
    if ctx.reduction == "none":
        ctx.options = (ignore_index, z_loss, softcap, *how)
        ctx.save_for_backward(hidden, weight, targets)
    else:
        ctx.save_for_backward(*grads)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 10
    if grad is None:
        return None, None, *nothing
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: its gradients are computed in the forward pass, as numbers."
            f" Leave create_graph=True out, or {_INSTEAD}."
        )
    if ctx.reduction == "none":
        grads = linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options, *ctx.want)
    else:
        factor = grad / ctx.lift
        grads = tuple(_scaled(ctx, saved, factor) for saved in _saved_once(ctx))
    return *(g if want else None for g, want in zip(grads, ctx.want, strict=True)), *nothing


def _saved_once(ctx: Any) -> tuple[Tensor, ...]:
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        saved = None
    # Autograd itself does not notice if saved-tensor hooks return the scaled tensors.
    if saved is None or any(not ctx.scaled.isdisjoint(_memory_of(tensor)) for tensor in saved):
        raise RuntimeError(
            "linear_cross_entropy was differentiated twice, and its gradients are scaled in place."
            " Call backward once, or use backend='reference' for a second time."
        )
    return saved


def _memory_of(tensor: Tensor) -> set[object]:
    return {memory for memory, _ in storages(tensor)} if type(tensor) is Tensor else set()


def _scaled(ctx: Any, saved: Tensor, grad: Tensor) -> Tensor:
    # In place unless traced; a compiled backward does the same by itself. Not with a 0-dim tensor, which would first be
    # rounded to the gradient's dtype.
    if type(saved) is not Tensor or type(grad) is not Tensor:
        return saved * grad
    ctx.scaled.update(_memory_of(saved))
    return saved.mul_(grad.reshape(1))


_INSTEAD = "take backend='reference'"
linear_cross_entropy_backward = define_operator(
    _backward, name="linear_cross_entropy_backward", fake=_empty_backward, instead=_INSTEAD
)
linear_cross_entropy_forward = define_operator(
    _forward,
    name="linear_cross_entropy_forward",
    fake=_empty_forward,
    keep=_keep,
    differentiate=_differentiate,
    instead=_INSTEAD,
)


@register_flop_formula(torch.ops.lightning_ups.linear_cross_entropy_forward, get_raw=True)
def _forward_flops(hidden: Tensor, weight: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    want_hidden, want_weight = options[-2:] if options[4] != "none" else (False, False)
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


@register_flop_formula(torch.ops.lightning_ups.linear_cross_entropy_backward, get_raw=True)
def _backward_flops(grad: Tensor, hidden: Tensor, weight: Tensor, *options: Any, out_val: Any = None, **_: Any) -> int:
    want_hidden, want_weight = options[-2:]
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return min((hidden.dtype, weight.dtype), key=lambda dtype: dtype.itemsize)


def _by_torch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    round_logits: bool,
    reduction: Reduction,
    chunk: int | Literal["auto"],
) -> Tensor:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    dtype = _product_dtype(hidden, weight)
    rounds = round_logits and dtype != torch.promote_types(dtype, torch.float32)
    if options is None or z_loss or softcap or rounds:
        unknown = "it knows neither z_loss nor softcap, and rounds no logits"
        why = "this torch has no F.linear_cross_entropy" if options is None else unknown
        instead = ", or round_logits=False" if options is not None and rounds and not (z_loss or softcap) else ""
        raise ValueError(
            f"linear_cross_entropy(backend='torch') is not possible: {why}. Use backend='chunked'{instead}."
        )
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
    )
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    return loss.view(targets.shape) if reduction == "none" else loss


def _validate(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if any(isinstance(tensor, DTensor) for tensor in (hidden, weight, targets)):
        raise TypeError(
            "linear_cross_entropy needs all classes of each row, and was given a DTensor. Call it in the forward of the"
            " module that owns the weight, or pass weight.full_tensor(); with a head parallel over the vocabulary use"
            " torch's loss_parallel."
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"linear_cross_entropy takes hidden [..., dim], weight [vocab, dim] and targets [...], not"
            f" {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}. Pass the weight of nn.Linear as"
            " it is, and one class for each row of hidden."
        )
    if not hidden.device == weight.device == targets.device:
        raise ValueError(
            f"linear_cross_entropy was given hidden on {hidden.device}, weight on {weight.device} and targets on"
            f" {targets.device}. Move them to one device first, such as by targets.to(hidden.device)."
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise TypeError(f"The targets of linear_cross_entropy are {targets.dtype}, not integers. Use targets.long().")


def _validate_options(*, reduction: str, chunk: int | str, backend: str, z_loss: float, softcap: float | None) -> None:
    for name, value, known in (("reduction", reduction, Reduction), ("backend", backend, Backend)):
        if value not in get_args(known):
            raise ValueError(f"linear_cross_entropy({name}={value!r}) is not known. Use one of {get_args(known)}.")
    if isinstance(chunk, int) and chunk < 1:
        raise ValueError(f"linear_cross_entropy(chunk={chunk!r}) has no rows. Use a positive number, or 'auto'.")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if isinstance(value, Tensor):
            raise TypeError(
                f"linear_cross_entropy was given a tensor as {name}, of which it gives no gradient."
                f" Use float({name}) of one that is not learned."
            )
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"linear_cross_entropy({name}={value}) is below 0, or not finite. Use 0 or more.")
