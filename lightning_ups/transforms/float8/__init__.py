"""Float8 layers by torchao."""

from lightning_ups.transforms.float8.convert import (
    Float8Conversion,
    conversion_of,
    convert_to_float8,
    fitting_linears,
    float8_linears,
    why_left,
    why_none_fits,
)
from lightning_ups.transforms.float8.gather import Scales
from lightning_ups.transforms.float8.recipes import (
    RECIPES,
    Format,
    Recipe,
    check_recipe,
    compiler_settings,
    float8_swap,
    recipe_of,
    register,
)

__all__ = [
    "RECIPES",
    "Float8Conversion",
    "Format",
    "Recipe",
    "Scales",
    "check_recipe",
    "compiler_settings",
    "conversion_of",
    "convert_to_float8",
    "fitting_linears",
    "float8_linears",
    "float8_swap",
    "recipe_of",
    "register",
    "why_left",
    "why_none_fits",
]
