"""Casting parameters, inputs and products."""

from lightning_ups.transforms.casting.cast import cast_around, cast_tensors, is_wide, telling_rounded_losses
from lightning_ups.transforms.casting.in_float32 import computing_in_float32, kept_in_float32, within
from lightning_ups.transforms.casting.matmuls import matmul_weights, name_other_layers

__all__ = [
    "cast_around",
    "cast_tensors",
    "computing_in_float32",
    "is_wide",
    "kept_in_float32",
    "matmul_weights",
    "name_other_layers",
    "telling_rounded_losses",
    "within",
]
