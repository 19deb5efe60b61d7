"""Casting parameters, inputs and products."""

from lightning_ups.transforms.casting.cast import (
    cast_around,
    cast_tensors,
    computing_in_float32,
    is_wide,
    kept_in_float32,
    telling_rounded_losses,
    within,
)
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
