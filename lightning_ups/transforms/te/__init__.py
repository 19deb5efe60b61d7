"""Layers of Transformer Engine."""

from lightning_ups.transforms.te.convert import Fuse, TEConversion, convert_to_te
from lightning_ups.transforms.te.forward import is_computed
from lightning_ups.transforms.te.fusions import Fusion
from lightning_ups.transforms.te.modules import Borrower, lay_together, linear_for, norm_linear_for, norm_mlp_for
from lightning_ups.transforms.te.recipes import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "Borrower",
    "Fuse",
    "Fusion",
    "Recipe",
    "TEConversion",
    "convert_to_te",
    "is_computed",
    "lay_together",
    "linear_for",
    "norm_linear_for",
    "norm_mlp_for",
]
