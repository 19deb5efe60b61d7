"""Layers of Transformer Engine."""

from lightning_ups.transforms.te.attention import EngineAttention, engine_attention
from lightning_ups.transforms.te.convert import MULTIPLE, Fuse, TEConversion, convert_to_te
from lightning_ups.transforms.te.forward import is_computed
from lightning_ups.transforms.te.fusions import Fusion
from lightning_ups.transforms.te.modules import Borrower, lay_together, linear_for, norm_linear_for, norm_mlp_for

__all__ = [
    "MULTIPLE",
    "Borrower",
    "EngineAttention",
    "Fuse",
    "Fusion",
    "TEConversion",
    "convert_to_te",
    "engine_attention",
    "is_computed",
    "lay_together",
    "linear_for",
    "norm_linear_for",
    "norm_mlp_for",
]
