"""Recomputation of activations in the backward pass."""

from lightning_ups._compat.torch.tensors.ops import register_costly_op
from lightning_ups.transforms.recompute.kept import note_recomputed_otherwise
from lightning_ups.transforms.recompute.wrapping import (
    Kept,
    Save,
    is_recomputed,
    memory_budget,
    recompute,
    refuse_recomputed,
)

__all__ = [
    "Kept",
    "Save",
    "is_recomputed",
    "memory_budget",
    "note_recomputed_otherwise",
    "recompute",
    "refuse_recomputed",
    "register_costly_op",
]
