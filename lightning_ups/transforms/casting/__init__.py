"""Casting parameters, inputs and products."""

from lightning_ups.transforms.casting.autocast_errors import refused_autocast
from lightning_ups.transforms.casting.cast import cast_around, cast_tensors, is_wide, telling_rounded_losses
from lightning_ups.transforms.casting.in_float32 import computing_in_float32, kept_in_float32, within
from lightning_ups.transforms.casting.matmuls import matmul_weights
from lightning_ups.transforms.casting.other_layers import name_other_layers

__all__ = [
    "cast_around",
    "cast_tensors",
    "computing_in_float32",
    "is_wide",
    "kept_in_float32",
    "matmul_weights",
    "name_other_layers",
    "refused_autocast",
    "telling_rounded_losses",
    "within",
]
