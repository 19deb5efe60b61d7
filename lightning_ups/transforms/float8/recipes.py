"""The float8 recipes of linear layers, one entry each."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.torch import probes
from lightning_ups._compat.torch.compile.graph_passes import leaner_casts
from lightning_ups._compat.torch.compile.inductor import eager_precision_casts, known_to_caches
from lightning_ups._compat.torch.compile.launches import launched_by_graphs
from lightning_ups.kernels import float8_casts, float8_casts_triton, float8_row_casts, float8_row_casts_triton
from lightning_ups.kernels.float8_casts import HAS_KERNELS
from lightning_ups.kernels.float8_casts_triton import maxima_where_written
from lightning_ups.transforms.float8 import product
from lightning_ups.transforms.float8.gather import show_plain_weight
from lightning_ups.transforms.float8.layers import adapted, mx_linear_from
from lightning_ups.transforms.float8.product import FastSums, multiplied, multiplied_by_rows

Format = Literal["e4m3", "hybrid"]
Swap = Callable[[nn.Linear], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How linear layers multiply in float8.

    Args:
        name: As users write it.
        scales: Which values share one scale, as in "each row". Used in the documentation and in errors.
        swap: Called with ``number_format``, ``all_gather`` and ``emulate``; returns a function that converts an
            ``nn.Linear``. It may raise ModuleNotFoundError.
        layer: The class name of the converted layers.
        rounding: How operands are rounded: per ``"tensor"``, ``"row"``, ``"block"`` of 32, or ``"row, gradient of the
            weight exact"``. ``verify`` compares with a reference that rounds in this way.
        capability: The minimum compute capability of the GPU.
        gpus: GPUs with this capability, for errors.
        multiple: Both dimensions of a layer must be multiples of this number.
        formats: The number formats that can be chosen, the default first.
        gathers: Whether FSDP2 can gather its weights in float8, which requires one scale for the whole weight.
        compiling: Returns a context in which layers are compiled. Its argument is whether kernels of this package
            make the casts.
        technique: Name of its row in ``doctor``. None: it has no row.
        probe: Runs one such product on a device, for ``doctor``.
    """

    name: str
    scales: str
    swap: Callable[..., Swap]
    layer: str
    rounding: str
    capability: tuple[int, int] = (8, 9)  # Ada; Hopper is (9, 0)
    gpus: str = "H100, H200 or L40S"
    multiple: int = 16
    formats: tuple[Format, ...] = ("e4m3",)
    gathers: bool = False
    compiling: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    technique: str | None = None
    probe: Callable[[torch.device], None] | None = None

    def fits(self, linear: nn.Linear, *, tensor_size: int = 1) -> bool:
        """Return whether the dimensions of ``linear``, split over ``tensor_size`` devices, are the right multiples."""
        return not any(size % (self.multiple * tensor_size) for size in (linear.in_features, linear.out_features))


RECIPES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> Recipe:
    """Make ``recipe`` available in `Float8Precision` and the commands.

    Raises:
        ValueError: If a recipe of this name exists.
    """
    if RECIPES.setdefault(recipe.name, recipe) is not recipe:
        raise ValueError(f"A float8 recipe {recipe.name!r} is registered already. Choose another name.")
    return recipe


def recipe_of(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        ValueError: If there is no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(f"The float8 recipe {name!r} is unknown. Use one of {tuple(RECIPES)}.")
    return RECIPES[name]


def check_recipe(name: str, *, all_gather: bool, number_format: str = "e4m3") -> None:
    """Check that the recipe exists and supports the number format and float8 gathers.

    Raises:
        ValueError: If it does not.
    """
    recipe = recipe_of(name)
    if number_format not in get_args(Format):
        raise ValueError(f"The float8 format {number_format!r} is unknown. Use one of {get_args(Format)}.")
    if number_format not in recipe.formats:
        raise ValueError(
            f"The float8 recipe {name!r} is given with number_format={number_format!r}."
            f" This recipe has one scale for {recipe.scales} and does not need a wider range."
            f" Use {_choices(lambda each: number_format in each.formats)}, or number_format={recipe.formats[0]!r}."
        )
    if all_gather and not recipe.gathers:
        raise ValueError(
            f"The float8 recipe {name!r} is given with all_gather=True."
            f" A gather in float8 needs one scale for the whole weight, and this recipe has one for {recipe.scales}."
            f" Use {_choices(lambda each: each.gathers)}, or all_gather=False."
        )


def _choices(fits: Callable[[Recipe], bool]) -> str:
    return " or ".join(f"recipe={each.name!r}" for each in RECIPES.values() if fits(each))


def compiler_settings(name: str, *, by_kernels: bool = HAS_KERNELS) -> AbstractContextManager[Any]:
    """Return a context with the compiler settings of a recipe, or an empty one if the recipe is unknown.

    Args:
        name: The name of the recipe.
        by_kernels: Whether all casts are made by kernels of this package. Otherwise the compiler fuses them with other
            operators, and row-wise recipes need settings that make it round as eager code does.
    """
    return RECIPES[name].compiling(by_kernels) if name in RECIPES else nullcontext()


def float8_swap(name: str, *, number_format: Format = "e4m3", all_gather: bool = False, emulate: bool = False) -> Swap:
    """Return a function that converts a linear layer to float8, with the same Parameters or views of them.

    Raises:
        ModuleNotFoundError: If torchao is missing, or is too old for the recipe.
    """
    return recipe_of(name).swap(number_format=number_format, all_gather=all_gather, emulate=emulate)


def _torchao_swap(name: str, *, number_format: Format, all_gather: bool, emulate: bool) -> Swap:
    torchao = require("torchao.float8", requirement="torchao>=0.17", extra="float8", feature="Float8Precision")
    by_rows = name != "tensorwise"
    config = replace(
        torchao.Float8LinearConfig.from_recipe_name(name),
        **({} if by_rows or number_format == "hybrid" else _finer_gradients(torchao)),
        enable_fsdp_float8_all_gather=all_gather,
        emulate=emulate,
        pad_inner_dim=True,
    )

    def swap(linear: nn.Linear) -> nn.Module:
        # Torchao's public function also keeps Triton from storing wrong bytes in kernels compiled later.
        float8 = adapted(torchao.convert_to_float8_training(linear, config=config), by_rows=by_rows)
        if all_gather:
            show_plain_weight(float8)
        return float8

    return swap


def _finer_gradients(torchao: Any) -> dict[str, Any]:
    """Return settings that cast gradients to e4m3, with three bits of mantissa, as inputs and weights.

    That halves their rounding error. Torchao's default is e5m2, whose wider range a tensor with one scale seldom needs.
    """
    cast = torchao.config.CastConfig(target_dtype=torchao.config.e4m3_dtype)
    return {"cast_config_grad_output": cast, "cast_config_grad_output_for_grad_weight": cast}


_CASTS = (float8_casts.__file__, float8_casts_triton.__file__)


@contextmanager
def _compiling_tensors(_: bool) -> Iterator[None]:  # noqa: FBT001
    launched = launched_by_graphs(float8_casts_triton.OPERATORS, sources=_CASTS)
    known = known_to_caches(multiplied, FastSums, sources=(product.__file__, *_CASTS))
    with maxima_where_written(), leaner_casts(), launched, known:
        yield


@contextmanager
def _compiling_rows(by_kernels: bool) -> Iterator[None]:  # noqa: FBT001
    casts = (*_CASTS, float8_row_casts.__file__, float8_row_casts_triton.__file__)
    launched = launched_by_graphs(float8_row_casts_triton.OPERATORS, sources=casts)
    known = known_to_caches(multiplied_by_rows, FastSums, sources=(product.__file__, *casts))
    with nullcontext() if by_kernels else eager_precision_casts(), launched, known:
        yield


register(
    Recipe(
        name="tensorwise",
        scales="each tensor",
        swap=partial(_torchao_swap, "tensorwise"),
        layer="Float8Linear",
        rounding="tensor",
        formats=("e4m3", "hybrid"),
        gathers=True,
        compiling=_compiling_tensors,
        technique="float8-tensorwise",
        probe=lambda device: probes.float8_matmul(device, rowwise=False),
    )
)
_ROWWISE = register(
    Recipe(
        name="rowwise",
        scales="each row",
        swap=partial(_torchao_swap, "rowwise"),
        layer="Float8Linear",
        rounding="row",
        compiling=_compiling_rows,
        technique="float8-rowwise",
        probe=lambda device: probes.float8_matmul(device, rowwise=True),
    )
)
register(
    replace(
        _ROWWISE,
        name="rowwise_with_gw_hp",  # gradients of weights in high precision
        swap=partial(_torchao_swap, "rowwise_with_gw_hp"),
        rounding="row, gradient of the weight exact",
        technique=None,
    )
)
register(
    Recipe(
        name="mxfp8",
        scales="every 32 values",
        swap=mx_linear_from,
        layer="MXFP8Linear",
        rounding="block",
        capability=(10, 0),  # Blackwell multiplies in it; Hopper does not
        gpus="B200",
        multiple=32,
        technique="mxfp8",
        probe=lambda device: probes.mxfp8_matmul(device),
    )
)
