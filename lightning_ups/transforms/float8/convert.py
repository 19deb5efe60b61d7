"""Converts linear layers to float8, with torchao."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ups.transforms.blocks import find_blocks, select_names
from lightning_ups.transforms.casting import name_other_layers
from lightning_ups.transforms.float8.recipes import RECIPES, Format, check_recipe, float8_swap, recipe_of
from lightning_ups.transforms.on_module import OnModule

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, kw_only=True)
class Float8Conversion:
    """The result of a conversion.

    Args:
        converted: Names of the layers that compute in float8.
        skipped: Why other layers were not converted, by name.
        misfits: Layers of ``skipped`` that were requested, but whose shape, dtype or class does not allow it.
        shared: Layers of ``converted`` whose weights are not gathered in float8, because other layers share them.
    """

    converted: tuple[str, ...]
    skipped: Mapping[str, str]
    misfits: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    _module: nn.Module = field(repr=False)
    _originals: Sequence[tuple[nn.Module, str, nn.Linear]] = field(default=(), repr=False)

    def undo(self) -> None:
        """Restore the original layers, with their current weights."""
        for parent, name, original in self._originals:
            float8 = getattr(parent, name)
            for kept in ("weight", "bias"):
                if kept in float8._parameters:
                    setattr(original, kept, getattr(float8, kept))
                elif kept in vars(float8):  # computed from others, for example by pruning
                    vars(original)[kept] = vars(float8)[kept]
            original.train(float8.training)
            setattr(parent, name, original)
        if conversion_of(self._module) is self:
            _CONVERSION.drop(self._module)


_CONVERSION = OnModule[Float8Conversion]("float8")


def conversion_of(module: nn.Module) -> Float8Conversion | None:
    """Return the result of the last conversion of ``module``, or None if there was none or it was undone."""
    return _CONVERSION.get(module)


def convert_to_float8(
    module: nn.Module,
    *,
    recipe: str,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    losers: Mapping[str, str] | None = None,
    tensor_size: int = 1,
    number_format: Format = "e4m3",
    all_gather: bool = False,
    emulate: bool = False,
) -> Float8Conversion:
    """Replace linear layers of ``module`` in place by ones that multiply in float8; names and weights stay.

    Some layers are left out, each with its reason: layers whose dimensions are not the multiples that the kernels
    require, layers with their own forward, layers whose weights a parent reads, and, unless ``head`` or ``include``
    says otherwise, layers outside the blocks that repeat.

    Args:
        module: The module.
        recipe: The name of a recipe in `RECIPES`.
        include: Patterns of linear layers to convert. None: those in the blocks.
        exclude: Patterns of layers to leave out.
        head: Also convert linear layers outside the blocks, such as the head of a language model.
        losers: Layers to leave out although they fit, with the reason (for example, that they would be slower), by
            name. If given, it is not an error that nothing is converted.
        tensor_size: The number of devices over which tensor parallelism will split a layer.
        number_format: ``"e4m3"`` for everything, or ``"hybrid"``, with gradients in e5m2, for ``"tensorwise"``.
        all_gather: Let FSDP2 gather weights in float8. Each weight becomes another Parameter, except weights that
            several layers share, which are gathered as they are.
        emulate: Compute float8 results in high precision, on any device.

    Raises:
        ValueError: If a pattern matches nothing, if nothing can be converted, or if ``recipe`` does not support float8
            gathers or the number format.
    """
    check_recipe(recipe, all_gather=all_gather, number_format=number_format)
    selection = {"include": include, "exclude": exclude, "head": head, "tensor_size": tensor_size}
    fitting, reasons, misfits = _choose(module, recipe, **selection)
    if not fitting and losers is None:
        raise ValueError(_none_fits(module, reasons, recipe=recipe, **selection))
    losing = {name: why for name, why in (losers or {}).items() if name in fitting}
    chosen = {name: linear for name, linear in fitting.items() if name not in losing}
    shared = _with_shared_weights(module, chosen) if all_gather else ()
    originals: list[tuple[nn.Module, str, nn.Linear]] = []
    for name, linear in chosen.items():
        gathers = all_gather and name not in shared
        swap = float8_swap(recipe, number_format=number_format, all_gather=gathers, emulate=emulate)
        originals += _put(module, linear, swap(linear))
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


def fitting_linears(module: nn.Module, **selection: Any) -> dict[str, nn.Linear]:
    """Return the layers that ``convert_to_float8`` would convert, by name, for its arguments ``selection``."""
    return _choose(module, **selection)[0]


def why_left(module: nn.Module, **selection: Any) -> dict[str, str]:
    """Return the reasons why ``fitting_linears`` leaves layers out, by name."""
    return _choose(module, **selection)[1]


def why_none_fits(module: nn.Module, **selection: Any) -> str | None:
    """Return why ``fitting_linears`` finds no layer in ``module``, or None if it finds one."""
    try:
        fitting, reasons, _ = _choose(module, **selection)
    except ValueError as error:  # a pattern that matches nothing
        return str(error)
    return None if fitting else _none_fits(module, reasons, **selection)


def float8_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``module`` that multiply in float8, without importing torchao."""
    return {name: m for name, m in module.named_modules() if _is_float8(m)}


def _none_fits(module: nn.Module, reasons: Mapping[str, str], **selection: Any) -> str:
    anywhere, misfits, _ = _choose(module, **selection | {"include": None, "exclude": (), "head": True})
    shown = reasons if anywhere else misfits
    some = "; ".join(f"{name}: {why}" for name, why in [*shown.items()][:4]) or "It has no nn.Linear"
    cure = "Name others by include=[...], or use BF16Precision." if anywhere else "Use BF16Precision."
    what = f"No linear layer of {type(module).__name__} can compute in float8."
    return f"{what} {some}.{name_other_layers(module)} {cure}"


def _choose(
    module: nn.Module,
    recipe: str,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    tensor_size: int = 1,
) -> tuple[dict[str, nn.Linear], dict[str, str], list[str]]:
    """Return the layers to convert, why the others are not, and which of the others were requested."""
    linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    of = type(module).__name__
    excluded = select_names(linears, exclude, kind="linear layer", of=of) if exclude else {}
    included = list(linears if include is None else select_names(linears, include, kind="linear layer", of=of))
    reasons = {name: f"excluded by {pattern!r}" for name, pattern in excluded.items()}
    if include is None and not head:
        inside = {inner for block in find_blocks(module).values() for inner in block.modules()}
        reasons |= {name: "outside the blocks" for name, linear in linears.items() if linear not in inside}
    asked = [name for name in included if name not in reasons]
    unfit = {name: _unfit(linears[name], recipe, tensor_size=tensor_size) for name in asked}
    misfits = {name: why for name, why in unfit.items() if why is not None}
    return {name: linears[name] for name in asked if name not in misfits}, reasons | misfits, [*misfits]


def _unfit(linear: nn.Linear, recipe: str, *, tensor_size: int) -> str | None:
    if _is_float8(linear):
        return "converted already"
    if type(linear).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight without calling it"
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        return "has its own forward"
    if not isinstance(vars(linear)["_parameters"].get("weight"), nn.Parameter):
        return "its weight is computed from others, by a parametrization, weight norm or pruning"
    if is_lazy(linear.weight):
        return "its weight has no shape before the first batch"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    if recipe_of(recipe).fits(linear, tensor_size=tensor_size):
        return None
    split = "" if tensor_size == 1 else f", split over {tensor_size} devices,"
    return f"{linear.in_features} x {linear.out_features}{split} is no multiple of {recipe_of(recipe).multiple}"


def _put(module: nn.Module, linear: nn.Linear, float8: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Replace ``linear`` by ``float8`` wherever it is, and return these places."""
    float8.train(linear.training)
    _take_over(float8, linear)
    places = [(m, name) for m in module.modules() for name, child in m._modules.items() if child is linear]
    for parent, name in places:
        setattr(parent, name, float8)
    return [(parent, name, linear) for parent, name in places]


def _with_shared_weights(module: nn.Module, chosen: Mapping[str, nn.Linear]) -> list[str]:
    """Return the layers whose weight is also used elsewhere: it must remain one Parameter."""
    places = [child for m in module.modules() for child in m._modules.values() if child is not None]
    owners = Counter(id(p) for m in (module, *places) for p in m._parameters.values() if p is not None)
    return [name for name, linear in chosen.items() if owners[id(linear.weight)] > 1]


def _take_over(float8: nn.Module, linear: nn.Linear) -> None:
    # Torchao creates a new layer with nothing but the weights. Hooks that users register stay registered, and removing
    # one by its handle removes it, ...
    for table in _HOOK_TABLES:
        setattr(float8, table, getattr(linear, table))
    float8._is_full_backward_hook = linear._is_full_backward_hook  # a module has hooks of one kind only
    # Parameters are shared, too, except for replaced ones: code that prunes the original layer prunes the float8 one.
    if float8.weight is linear.weight:
        float8._parameters, float8._buffers = linear._parameters, linear._buffers
        float8._non_persistent_buffers_set = linear._non_persistent_buffers_set
    # ... and so does the initialization of a subclass, which is still to come on the meta device.
    for name in vars(linear).keys() - vars(float8).keys():
        setattr(float8, name, vars(linear)[name])
    if type(linear).reset_parameters is not nn.Linear.reset_parameters:
        object.__setattr__(float8, "reset_parameters", MethodType(type(linear).reset_parameters, float8))


def _is_float8(module: nn.Module) -> bool:
    return type(module).__name__ in {recipe.layer for recipe in RECIPES.values()}
