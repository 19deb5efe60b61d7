"""Adapts torchao's linear layers to all inputs of nn.Linear, and raises for what they do not support."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.torch.tensors.autograd import in_torch_func
from lightning_ups._compat.torch.versions import is_exporting
from lightning_ups.transforms.float8.product import FastSums, can_multiply, product, product_by_rows

_BLOCK = 32  # values of MXFP8 that share a scale


def adapted(float8: nn.Module, *, by_rows: bool) -> nn.Module:
    """Return torchao's layer, which from now on also accepts empty inputs and inputs of any memory layout.

    Args:
        float8: The layer.
        by_rows: Whether it has a scale for each row. Such a layer needs contiguous inputs.
    """
    float8.__class__ = _adapted_class(type(float8), by_rows=by_rows)
    return float8


@cache
def _adapted_class(plain: type[nn.Module], *, by_rows: bool) -> type[nn.Module]:
    class Float8Linear(plain):  # pyright: ignore[reportGeneralTypeIssues]
        def forward(self, input: Tensor) -> Tensor:
            _refuse_tracing()
            if input.is_nested:
                return _by_values(self, input)
            input = _in_type_of_autocast(input)
            if (output := _with_kernels(self, input, by_rows=by_rows)) is not None:
                return output
            if by_rows:
                input = input.contiguous()
            if torch.compiler.is_compiling():  # compiled code has no second derivatives
                return super().forward(input) if by_rows else _as_matrix(super().forward, input)
            if input.numel() == 0:
                return _in_high_precision(self, input)
            if torch.is_inference_mode_enabled():
                # In inference mode operators such as reshape get torchao's tensors, which only support them outside of
                # it.
                with torch.inference_mode(mode=False), torch.no_grad():
                    return super().forward(input)
            return _once_differentiable(super().forward(input))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # A pickle would look for the generated class by its name. An older protocol does not need the class.
        make, arguments, *state = plain.__reduce_ex__(self, min(protocol, 1))
        return _remade, (by_rows, make, tuple(plain if a is type(self) else a for a in arguments)), *state

    Float8Linear.__doc__, Float8Linear.__reduce_ex__ = plain.__doc__, reduce  # type: ignore[method-assign]
    return Float8Linear


def _remade(by_rows: bool, make: Any, arguments: tuple[Any, ...]) -> nn.Module:  # noqa: FBT001
    return adapted(make(*arguments), by_rows=by_rows)


def _refuse_tracing() -> None:
    """Raise if the current forward is exported or traced, or differentiated by `torch.func`.

    Raises:
        RuntimeError: In either case.
    """
    if is_exporting() or torch.jit.is_tracing():
        raise RuntimeError(
            "A model is exported, by torch.export, torch.onnx or torch.jit, whose linear layers multiply in float8."
            " Export after the fit, when layers are torch's own, or load the state dict into a module built anew."
        )
    if not torch.compiler.is_compiling() and in_torch_func():
        raise RuntimeError(
            "torch.func computes through a linear layer in float8, as vmap, grad, jvp and jacrev do."
            " Leave these layers out, by exclude=[...] in the precision, or use BF16Precision."
        )


def _by_values(layer: nn.Module, nested: Tensor) -> Tensor:
    """Return the output of ``layer`` for a nested tensor, which `nn.TransformerEncoder` uses in evaluation."""
    if nested.layout is torch.jagged:
        values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()  # type: ignore[operator]
        return torch.nested.nested_tensor_from_jagged(layer(values), offsets=offsets, lengths=lengths)
    parts = nested.unbind()
    rows = layer(torch.cat(parts))
    return torch.nested.as_nested_tensor([*rows.split([part.shape[0] for part in parts])])


def _in_type_of_autocast(value: Tensor) -> Tensor:
    """Return ``value`` in the autocast dtype of its device, if autocast is on; torchao always uses CUDA's."""
    device = value.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return value.to(torch.get_autocast_dtype(device)) if on else value


def _with_kernels(layer: Any, input: Tensor, *, by_rows: bool) -> Tensor | None:
    """Return the layer's output using cast kernels of this package, or None if there are none for it."""
    sums = layer.linear_mm_config
    if sums.output.emulate or not can_multiply(input, layer.weight):
        return None
    fast = FastSums(*(each.use_fast_accum for each in (sums.output, sums.grad_input, sums.grad_weight)))
    if by_rows:
        exact = layer.config.cast_config_input_for_grad_weight.scaling_type.name == "DISABLED"
        output = product_by_rows(input, layer.weight, layer.bias, fast, exact_weight_gradient=exact)
    else:
        output = product(
            input, layer.weight, layer.bias, fast, backward_dtype=layer.config.cast_config_grad_output.target_dtype
        )
    return output if torch.compiler.is_compiling() else _once_differentiable(output)


def _as_matrix(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    # Torchao computes the maximum of an input in its own shape, and again as a matrix in backward. A compiler merges
    # the two only if the shapes are equal; otherwise each input is read once more.
    if input.dim() <= 2:
        return forward(input)
    rows = forward(input.reshape(-1, input.shape[-1]))
    return rows.reshape(*input.shape[:-1], rows.shape[-1])


def _in_high_precision(layer: Any, input: Tensor) -> Tensor:
    """Return the output of ``layer`` for an empty input, which has no maximum to scale by."""
    weight = layer.weight
    if hasattr(weight, "to_original_precision"):  # gathered in float8
        weight = weight.to_original_precision()
    return F.linear(input.to(weight.dtype), weight, layer.bias)


def _once_differentiable(value: Tensor) -> Tensor:
    """Return ``value``; differentiating its gradient again raises an error."""
    return _Once.apply(value) if value.requires_grad else value  # type: ignore[no-any-return]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.detach()  # a view could not be written to in place, as in `x /= 2`

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A gradient is differentiated again, by create_graph=True. Float8 has no second derivative."
                " Leave these layers out, by exclude=[...] in the precision, or use BF16Precision."
            )
        return gradients[0]


def mx_linear_from(*, emulate: bool, **_: Any) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a linear layer to MXFP8, with the same Parameters.

    Args:
        emulate: Compute MXFP8 results in high precision, on any device.
        **_: Arguments of other recipes, ignored.

    Raises:
        ModuleNotFoundError: If torchao is missing.
        ImportError: If torchao does not have its MXFP8 linear layer in the expected module.
    """
    kind, preference = _mx_layers()
    chosen = preference.EMULATED if emulate else preference.AUTO

    def swap(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features
        made = kind(*sizes, bias=False, device="meta", kernel_preference=chosen)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    return swap


@cache
def _mx_layers() -> tuple[Any, Any]:
    layers: Any = require(
        "torchao.prototype.moe_training.mxfp8_linear",
        requirement="torchao>=0.17",
        extra="float8",
        feature="Float8Precision(recipe='mxfp8')",
    )
    if not hasattr(layers, "MXFP8Linear"):
        raise ImportError(
            "recipe='mxfp8' needs torchao's MXFP8Linear, which the installed torchao does not have."
            " It is a prototype, and its place changes between releases."
            " Install torchao 0.18, or use recipe='tensorwise'."
        )

    class MXFP8Linear(layers.MXFP8Linear):
        """Torchao's layer, extended to any number of rows and to autocast."""

        def forward(self, input: Tensor) -> Tensor:
            _refuse_tracing()
            if input.is_nested:
                return _by_values(self, input)
            x, weight = _in_type_of_autocast(input), _in_type_of_autocast(self.weight)
            eager = not torch.compiler.is_compiling()
            if eager and x.numel() == 0:
                return _in_high_precision(self, x)
            rows = x.reshape(-1, x.shape[-1])
            # The gradient of the weight has its blocks along the rows, and rows of zeros do not change it.
            padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % _BLOCK))
            result = layers._to_mxfp8_then_scaled_mm(
                padded, weight, self.kernel_preference, self.scale_calculation_mode, self.wgrad_with_hp
            )[: rows.shape[0]].reshape(*x.shape[:-1], -1)
            result = result if self.bias is None else result + self.bias.to(result.dtype)
            return _once_differentiable(result) if eager else result

    return MXFP8Linear, layers.KernelPreference
