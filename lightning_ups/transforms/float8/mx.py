"""Linear layers in MXFP8, which is float8 with one scale per 32 values, with torchao."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_ups._compat.optional.packages import require
from lightning_ups.transforms.float8.layers import (
    by_values,
    in_high_precision,
    in_type_of_autocast,
    once_differentiable,
    refuse_tracing,
)

__all__ = ["mx_linear_from"]

_BLOCK = 32


def mx_linear_from(*, emulate: bool, **_: Any) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a linear layer to MXFP8, with the same Parameters.

    Args:
        emulate: Compute MXFP8 results in high precision, on any device.
        **_: Arguments of other recipes, ignored.

    Raises:
        ModuleNotFoundError: If torchao is missing.
        ImportError: If torchao does not have its MXFP8 linear layer in the expected module.
    """
    kind, preference = _kind()
    chosen = preference.EMULATED if emulate else preference.AUTO

    def swap(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features
        made = kind(*sizes, bias=False, device="meta", kernel_preference=chosen)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    return swap


@cache
def _kind() -> tuple[Any, Any]:
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
            refuse_tracing()
            if input.is_nested:
                return by_values(self, input)
            x, weight = in_type_of_autocast(input), in_type_of_autocast(self.weight)
            eager = not torch.compiler.is_compiling()
            if eager and x.numel() == 0:
                return in_high_precision(self, x)
            rows = x.reshape(-1, x.shape[-1])
            # The gradient of the weight has its blocks along the rows, and rows of zeros do not change it.
            padded = pad(rows, (0, 0, 0, -rows.shape[0] % _BLOCK))
            result = layers._to_mxfp8_then_scaled_mm(
                padded, weight, self.kernel_preference, self.scale_calculation_mode, self.wgrad_with_hp
            )[: rows.shape[0]].reshape(*x.shape[:-1], -1)
            result = result if self.bias is None else result + self.bias.to(result.dtype)
            return once_differentiable(result) if eager else result

    return MXFP8Linear, layers.KernelPreference
