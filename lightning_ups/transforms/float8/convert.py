"""Matrix products of linear layers in float8, by torchao."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.torch.compile.graph_passes import leaner_casts
from lightning_ups._compat.torch.compile.inductor import eager_precision_casts, known_to_caches
from lightning_ups._compat.torch.compile.launches import launched_by_graphs
from lightning_ups.kernels import float8_casts, float8_casts_triton, float8_row_casts, float8_row_casts_triton
from lightning_ups.kernels.float8_casts import HAS_KERNELS
from lightning_ups.kernels.float8_casts_triton import maxima_where_written
from lightning_ups.transforms.blocks import find_blocks, select_names
from lightning_ups.transforms.casting import name_other_layers
from lightning_ups.transforms.float8 import product as float8_product
from lightning_ups.transforms.float8 import row_product as float8_row_product
from lightning_ups.transforms.float8.gather import show_plain_weight
from lightning_ups.transforms.float8.layers import adapted
from lightning_ups.transforms.float8.mx import mx_linear_from
from lightning_ups.transforms.float8.product import FastSums, multiplied
from lightning_ups.transforms.float8.row_product import multiplied_by_rows
from lightning_ups.transforms.on_module import OnModule

__all__ = [
    "Float8Conversion",
    "Format",
    "Recipe",
    "check_recipe",
    "compiler_settings",
    "conversion_of",
    "convert_to_float8",
    "fitting_linears",
    "float8_linears",
    "float8_swap",
    "why_left",
    "why_none_fits",
]

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
Format = Literal["e4m3", "hybrid"]

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CASTS = (float8_casts.__file__, float8_casts_triton.__file__)
FEATURE = "Float8Precision"


@dataclass(frozen=True, kw_only=True)
class Float8Conversion:
    """What a conversion did.

    Args:
        converted: Names of the layers that compute in float8.
        skipped: Why the others do not, by name.
        misfits: Those of ``skipped`` that were asked for, and whose shape, type or class does not allow it.
        shared: Those of ``converted`` whose weights are not gathered in float8, since others have them too.
    """

    converted: tuple[str, ...]
    skipped: Mapping[str, str]
    misfits: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    _module: nn.Module = field(repr=False)
    _originals: Sequence[tuple[nn.Module, str, nn.Linear]] = field(default=(), repr=False)

    def undo(self) -> None:
        """Put the layers of before in their places, with the weights that they have now."""
        for parent, name, original in self._originals:
            float8 = getattr(parent, name)
            for kept in ("weight", "bias"):
                if kept in float8._parameters:
                    setattr(original, kept, getattr(float8, kept))
                elif kept in vars(float8):  # made of others, which pruning has put in its place
                    vars(original)[kept] = vars(float8)[kept]
            original.train(float8.training)
            setattr(parent, name, original)
        if conversion_of(self._module) is self:
            _CONVERSION.drop(self._module)


_CONVERSION = OnModule[Float8Conversion]("float8")


def conversion_of(module: nn.Module) -> Float8Conversion | None:
    """Return what the last conversion of ``module`` did, or None if there is none or it was undone."""
    return _CONVERSION.get(module)


def convert_to_float8(
    module: nn.Module,
    *,
    recipe: Recipe,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    losers: Mapping[str, str] | None = None,
    tensor_size: int = 1,
    number_format: Format = "e4m3",
    all_gather: bool = False,
    emulate: bool = False,
) -> Float8Conversion:
    """Swap linear layers of ``module``, in place, for ones that multiply in float8; names and weights stay.

    Left out, each with its reason, are layers whose dimensions are not the multiples that the kernels ask for, layers
    with a forward of their own, layers whose weights a parent reads, and, unless ``head`` or ``include`` says
    otherwise, layers outside the blocks that repeat.

    Args:
        module: The module.
        recipe: ``"tensorwise"``, the fastest; ``"rowwise"``, finer scales; ``"rowwise_with_gw_hp"``, whose gradients
            of weights stay in high precision; ``"mxfp8"``, a scale for every 32 values.
        include: Patterns of names of linear layers. None: those in the blocks.
        exclude: Patterns of names that stay as they are.
        head: Also convert linear layers outside the blocks, such as the head of a language model.
        losers: Layers that stay as they are though they fit, since they would be slower, say, and the reason, by
            name. That nothing is left to convert is then no error.
        tensor_size: Over how many devices tensor parallelism will split a layer.
        number_format: ``"e4m3"`` everywhere, or ``"hybrid"``, with gradients in e5m2, for ``"tensorwise"``.
        all_gather: Let FSDP2 gather weights in float8. Each weight becomes another Parameter; one that several layers
            have stays what it is, and is gathered so.
        emulate: Compute in high precision what float8 would, on any device.

    Raises:
        ValueError: If a pattern matches nothing, if nothing can be converted, or if ``recipe`` cannot be gathered or
            knows no such format.
    """
    check_recipe(recipe, all_gather=all_gather, number_format=number_format)
    fitting, reasons, misfits = _choose(
        module, recipe, include=include, exclude=exclude, head=head, tensor_size=tensor_size
    )
    if not fitting:
        raise ValueError(_none_fits(module, reasons))
    losing = {name: why for name, why in (losers or {}).items() if name in fitting}
    chosen = {name: linear for name, linear in fitting.items() if name not in losing}
    shared = _with_shared_weights(module, chosen) if all_gather else ()
    originals = [
        place
        for name, linear in chosen.items()
        for place in _put(
            module,
            linear,
            float8_swap(
                recipe,
                number_format=number_format,
                all_gather=all_gather and name not in shared,
                emulate=emulate,
            )(linear),
        )
    ]
    done = Float8Conversion(
        converted=tuple(chosen),
        skipped=reasons | losing,
        misfits=tuple(misfits),
        shared=tuple(shared),
        _module=module,
        _originals=originals,
    )
    _CONVERSION.keep(module, done)
    return done


def fitting_linears(
    module: nn.Module,
    *,
    recipe: Recipe,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    tensor_size: int = 1,
) -> dict[str, nn.Linear]:
    """Return the layers that ``convert_to_float8`` would swap, by name."""
    return _choose(module, recipe, include=include, exclude=exclude, head=head, tensor_size=tensor_size)[0]


def why_left(module: nn.Module, **selection: Any) -> dict[str, str]:
    """Return why the layers that ``fitting_linears`` leaves out are left out, by name."""
    return _choose(module, **selection)[1]


def why_none_fits(module: nn.Module, **selection: Any) -> str | None:
    """Return why ``fitting_linears`` finds nothing in ``module``, or None if it finds something."""
    try:
        fitting, reasons, _ = _choose(module, **selection)
    except ValueError as error:  # a pattern that matches nothing
        return str(error)
    return None if fitting else _none_fits(module, reasons)


def check_recipe(recipe: str, *, all_gather: bool, number_format: str = "e4m3") -> None:
    """Refuse an unknown ``recipe`` or format, and a recipe with gathers or a format that it does not have.

    Raises:
        ValueError: If it is either.
    """
    if recipe not in get_args(Recipe):
        raise ValueError(
            f"The float8 recipe {recipe!r} is not a known one."
            " A recipe says how values are scaled into the range of float8."
            f" Use one of {get_args(Recipe)}."
        )
    if number_format not in get_args(Format):
        raise ValueError(
            f"The float8 format {number_format!r} is not a known one."
            " A format says of which types values and gradients are."
            f" Use one of {get_args(Format)}."
        )
    if number_format == "hybrid" and recipe != "tensorwise":
        raise ValueError(
            f"The float8 recipe {recipe!r} is given with number_format='hybrid'."
            " Its gradients are e4m3, since its many scales leave no need for the range of e5m2."
            " Use recipe='tensorwise', or number_format='e4m3'."
        )
    if all_gather and recipe != "tensorwise":
        raise ValueError(
            f"The float8 recipe {recipe!r} is given with all_gather=True."
            " A gather in float8 needs one scale for the whole weight, and this recipe has one for each row."
            " Use recipe='tensorwise', or all_gather=False."
        )


def float8_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``module`` that compute in float8, without importing torchao."""
    return {name: m for name, m in module.named_modules() if _is_float8(m)}


def _none_fits(module: nn.Module, reasons: Mapping[str, str]) -> str:
    what = f"No linear layer of {type(module).__name__} can compute in float8."
    others = name_other_layers(module)
    if not reasons:
        return f"{what} It has no nn.Linear.{others} Use BF16Precision."
    some = "; ".join(f"{name}: {why}" for name, why in [*reasons.items()][:4])
    return f"{what} {some}.{others} Name others by include=[...], or use BF16Precision."


def _choose(
    module: nn.Module,
    recipe: Recipe,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    tensor_size: int = 1,
) -> tuple[dict[str, nn.Linear], dict[str, str], list[str]]:
    """Return the layers to convert, why the others are not, and which of these were asked for."""
    linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    of = type(module).__name__
    excluded = select_names(linears, exclude, kind="linear layer", of=of) if exclude else {}
    included = list(linears if include is None else select_names(linears, include, kind="linear layer", of=of))
    reasons = {name: f"excluded by {pattern!r}" for name, pattern in excluded.items()}
    if include is None and not head:
        inside = _in_blocks(module)
        reasons |= {name: "outside the blocks" for name, linear in linears.items() if linear not in inside}
    misfits = [n for n in included if n not in reasons and _unfit(linears[n], recipe, tensor_size=tensor_size)]
    reasons |= {name: str(_unfit(linears[name], recipe, tensor_size=tensor_size)) for name in misfits}
    return {name: linears[name] for name in included if name not in reasons}, reasons, misfits


def _in_blocks(module: nn.Module) -> set[nn.Module]:
    return {inner for block in find_blocks(module).values() for inner in block.modules()}


def _unfit(linear: nn.Linear, recipe: Recipe, *, tensor_size: int) -> str | None:
    if _is_float8(linear):
        return "converted already"
    if type(linear).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        return "has a forward of its own"
    if not isinstance(vars(linear)["_parameters"].get("weight"), nn.Parameter):
        return "its weight is made of others, by a parametrization, a norm of the weight or pruning"
    if is_lazy(linear.weight):
        return "its weight has no shape before the first batch"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    multiple = _multiple(recipe)
    shape = f"{linear.in_features} x {linear.out_features}"
    if linear.in_features % multiple or linear.out_features % multiple:
        return f"{shape} is no multiple of {multiple}"
    if linear.in_features % (multiple * tensor_size) or linear.out_features % (multiple * tensor_size):
        return f"{shape}, split over {tensor_size} devices, is no multiple of {multiple}"
    return None


def _multiple(recipe: Recipe) -> int:
    """Return what the kernels ask of every dimension."""
    return 32 if recipe == "mxfp8" else 16


def _put(module: nn.Module, linear: nn.Linear, float8: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Put ``float8`` wherever ``linear`` is, and return these places."""
    float8.train(linear.training)
    _take_over(float8, linear)
    places = [(m, name) for m in module.modules() for name, child in m._modules.items() if child is linear]
    for parent, name in places:
        setattr(parent, name, float8)
    return [(parent, name, linear) for parent, name in places]


def _with_shared_weights(module: nn.Module, chosen: Mapping[str, nn.Linear]) -> list[str]:
    """Return which layers have a weight that is in another place too: it must remain one, and is read there."""
    places = [child for m in module.modules() for child in m._modules.values() if child is not None]
    owners = Counter(id(p) for m in (module, *places) for p in m._parameters.values() if p is not None)
    return [name for name, linear in chosen.items() if owners[id(linear.weight)] > 1]


def _take_over(float8: nn.Module, linear: nn.Linear) -> None:
    # Torchao makes a new layer with nothing but the weights. What users hang on one stays on it, and what they take
    # off again, by the handles that they have, is off, ...
    for table in _HOOK_TABLES:
        setattr(float8, table, getattr(linear, table))
    float8._is_full_backward_hook = linear._is_full_backward_hook  # which a module has of one kind
    # So are parameters, but for those that are others: what prunes the layer that it knows, prunes the one that runs.
    if float8.weight is linear.weight:
        float8._parameters, float8._buffers = linear._parameters, linear._buffers
        float8._non_persistent_buffers_set = linear._non_persistent_buffers_set
    # ... and so does what a subclass says of its initialisation, which on the meta device is yet to come.
    for name in vars(linear).keys() - vars(float8).keys():
        setattr(float8, name, vars(linear)[name])
    if type(linear).reset_parameters is not nn.Linear.reset_parameters:
        object.__setattr__(float8, "reset_parameters", MethodType(type(linear).reset_parameters, float8))


def compiler_settings(recipe: str, *, by_kernels: bool = HAS_KERNELS) -> AbstractContextManager[None]:
    """Return what holds, while it is open, the compiler's settings that ``recipe`` wants.

    Args:
        recipe: Of the layers.
        by_kernels: Whether each layer casts by kernels of ours, and none by operators that the compiler joins with
            others. Those have to round, for scales of rows, as eager code does.
    """
    if recipe == "tensorwise":
        return _tensorwise_settings()
    return _settings_by_rows(by_kernels) if recipe in ("rowwise", "rowwise_with_gw_hp") else nullcontext()


@contextmanager
def _tensorwise_settings() -> Iterator[None]:
    launched = launched_by_graphs(float8_casts_triton.OPERATORS, sources=_CASTS)
    known = known_to_caches(multiplied, FastSums, sources=(float8_product.__file__, *_CASTS))
    with maxima_where_written(), leaner_casts(), launched, known:
        yield


@contextmanager
def _settings_by_rows(by_kernels: bool) -> Iterator[None]:  # noqa: FBT001
    casts = (*_CASTS, float8_row_casts.__file__, float8_row_casts_triton.__file__)
    launched = launched_by_graphs(float8_row_casts_triton.OPERATORS, sources=casts)
    products = (float8_product.__file__, float8_row_product.__file__)
    known = known_to_caches(multiplied_by_rows, FastSums, sources=(*products, *casts))
    with nullcontext() if by_kernels else eager_precision_casts(), launched, known:
        yield


def float8_swap(
    recipe: Recipe, *, number_format: Format = "e4m3", all_gather: bool = False, emulate: bool = False
) -> Callable[[nn.Linear], nn.Module]:
    """Return what makes of a linear layer one that multiplies in float8, with the same Parameters or views of them.

    Raises:
        ModuleNotFoundError: If torchao is missing, or is too old for ``recipe``.
    """
    if recipe == "mxfp8":
        return mx_linear_from(emulate=emulate)
    torchao = require("torchao.float8", requirement="torchao>=0.17", extra="float8", feature=FEATURE)
    config = replace(
        torchao.Float8LinearConfig.from_recipe_name(recipe),
        **_finer_gradients(torchao) if recipe == "tensorwise" and number_format == "e4m3" else {},
        enable_fsdp_float8_all_gather=all_gather,
        emulate=emulate,
        pad_inner_dim=True,
    )

    def swap(linear: nn.Linear) -> nn.Module:
        # The public way, of one layer: it also keeps Triton from storing wrong bytes in kernels compiled later.
        float8 = adapted(torchao.convert_to_float8_training(linear, config=config), by_rows=recipe != "tensorwise")
        if all_gather:
            show_plain_weight(float8)
        return float8

    return swap


def _finer_gradients(torchao: Any) -> dict[str, Any]:
    """Return the settings by which gradients have three bits behind the point, as values have, and not two.

    That halves the error of each. Torchao has e5m2 here, for more range, which a tensor with one scale seldom uses.
    """
    cast = torchao.config.CastConfig(target_dtype=torchao.config.e4m3_dtype)
    return {"cast_config_grad_output": cast, "cast_config_grad_output_for_grad_weight": cast}


def _is_float8(module: nn.Module) -> bool:
    return type(module).__name__ in ("Float8Linear", "MXFP8Linear")
