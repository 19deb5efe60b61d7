"""The float8 recipes of Transformer Engine, one entry each."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_ups._compat.optional.te import make_recipe, why_not


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How Transformer Engine's modules multiply in float8.

    Args:
        name: As users write it.
        engine_class: The class in ``transformer_engine.common.recipe``.
        scales: How scales are computed, for the documentation.
        needs: Its requirements, for errors and the documentation.
        check: The function of ``transformer_engine.pytorch`` that returns whether a device supports it.
        rounding: How operands are rounded: per ``"tensor"`` or ``"block"``. ``verify`` compares with a reference that
            rounds in this way.
        hybrid: Whether gradients are in e5m2 unless the user chooses another number format.
        multiple: Both dimensions of a weight must be multiples of this number.
        keeps_scales: Whether scales persist across steps: checkpoints contain them, and a module may run once per step.
        compiles: Whether it works with ``Compile``.
        options: The arguments of `TEPrecision` that only this recipe takes.
    """

    name: str
    engine_class: str
    scales: str
    needs: str
    check: str = "is_fp8_available"
    rounding: str = "tensor"
    hybrid: bool = False
    multiple: int = 16
    keeps_scales: bool = False
    compiles: bool = True
    options: tuple[str, ...] = ()

    def takes(self, option: str) -> bool:
        """Return whether this argument of `TEPrecision` means something with the recipe."""
        return option in self.options or not any(option in each.options for each in RECIPES.values())

    def make(
        self,
        *,
        number_format: str | None = None,
        amax_history: int = 1024,
        amax_compute: str = "max",
        reduce_amax: bool = False,
    ) -> Any:
        """Return Transformer Engine's object for this recipe; options that the recipe lacks are ignored."""
        given = {"amax_history": amax_history, "amax_compute": amax_compute}
        engine_names = {"amax_history": "amax_history_len", "amax_compute": "amax_compute_algo"}
        options: dict[str, Any] = {engine_names.get(name, name): given[name] for name in self.options}
        if self.keeps_scales:
            options["reduce_amax"] = reduce_amax
        return make_recipe(self.engine_class, number_format=number_format, **options)

    def why_not(self, device: torch.device) -> str | None:
        """Return why it does not run on ``device``, or None."""
        return why_not(self.check, device)


_ROWS = (
    Recipe(
        name="delayed",
        engine_class="DelayedScaling",
        scales="the largest maximum, or the most recent, of `amax_history` steps",
        needs="capability 8.9",
        hybrid=True,
        keeps_scales=True,
        compiles=False,
        options=("amax_history", "amax_compute"),
    ),
    Recipe(
        name="current",
        engine_class="Float8CurrentScaling",
        scales="the tensor's own maximum",
        needs="capability 8.9",
        hybrid=True,
    ),
    Recipe(
        name="block",
        engine_class="Float8BlockScaling",
        scales="blocks of 128",
        needs="capability 9.0, CUDA 12.9",
        check="is_fp8_block_scaling_available",
        rounding="block",
    ),
    Recipe(
        name="mxfp8",
        engine_class="MXFP8BlockScaling",
        scales="blocks of 32",
        needs="capability 10.0",
        check="is_mxfp8_available",
        rounding="block",
        multiple=32,
    ),
)

RECIPES = {recipe.name: recipe for recipe in _ROWS}
