"""The float8 recipes of Transformer Engine, one entry each."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_ups._compat.optional.te import make_recipe, why_not

__all__ = ["RECIPES", "Recipe"]


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
        attention: The minimum compute capability for float8 attention. None: it has none.
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
    attention: tuple[int, int] | None = (10, 0)
    options: tuple[str, ...] = ()

    def takes(self, option: str) -> bool:
        """Return whether this argument of `TEPrecision` means something with the recipe."""
        if option == "fp8_attention":
            return self.attention is not None
        return option in self.options or not any(option in each.options for each in RECIPES.values())

    def make(
        self,
        *,
        number_format: str | None = None,
        amax_history: int = 1024,
        amax_compute: str = "max",
        margin: int = 0,
        reduce_amax: bool = False,
        attention: bool = False,
    ) -> Any:
        """Return Transformer Engine's object for this recipe; options that the recipe lacks are ignored."""
        given = {"amax_history": amax_history, "amax_compute": amax_compute, "margin": margin}
        engine_names = {"amax_history": "amax_history_len", "amax_compute": "amax_compute_algo"}
        options: dict[str, Any] = {engine_names.get(name, name): given[name] for name in self.options}
        if self.keeps_scales:
            options["reduce_amax"] = reduce_amax
        return make_recipe(self.engine_class, number_format=number_format, attention=attention, **options)

    def why_not(self, device: torch.device) -> str | None:
        """Return why it does not run on ``device``, or None."""
        return why_not(self.check, device)

    def why_no_attention(self, device: torch.device, *, width: int | None = None) -> str | None:
        """Return why attention cannot train with it on ``device``, with heads of this width, or None.

        Transformer Engine does not say why it has no kernel. Its kernels are cuDNN's: FlashAttention 3 has float8 for
        inference only.
        """
        if device.type != "cuda":
            return None
        capability = torch.cuda.get_device_capability(device)
        here = f"a GPU of capability {'.'.join(map(str, capability))}"
        if capability < (9, 0) or capability == (12, 0):
            return f"{here} has no float8 attention"
        if self.attention is None or capability < self.attention:
            others = [each.name for each in RECIPES.values() if each.attention and each.attention <= capability]
            return f"{here} has it with recipe={' or '.join(map(repr, others))} alone"
        if width is None:
            return None
        if capability < (10, 0):
            return None if width == 128 else f"{here} has it for heads of 128, and these are of {width}"
        return None if width % 16 == 0 and width <= 128 else f"heads of {width} are no multiple of 16 up to 128"


_ROWS = (
    Recipe(
        name="delayed",
        engine_class="DelayedScaling",
        scales="the largest maximum, or the most recent, of `amax_history` steps",
        needs="capability 8.9",
        hybrid=True,
        keeps_scales=True,
        compiles=False,
        attention=(9, 0),
        options=("amax_history", "amax_compute", "margin"),
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
        attention=None,
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
