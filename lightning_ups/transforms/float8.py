"""Matrix products of linear layers in float8, by torchao."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_ups._compat.optional import require
from lightning_ups.transforms.blocks import find_blocks, select_names

__all__ = ["Float8Conversion", "Recipe", "check_recipe", "convert_to_float8", "float8_linears", "precompute_scales"]

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
MULTIPLE = 16  # what the kernels ask of every dimension
FEATURE = "Float8Precision"


@dataclass(frozen=True, kw_only=True)
class Float8Conversion:
    """What a conversion did.

    Args:
        converted: Names of the layers that compute in float8.
        skipped: Why the others do not, by name.
    """

    converted: tuple[str, ...]
    skipped: Mapping[str, str]
    _originals: Sequence[tuple[nn.Module, str, nn.Linear]] = field(repr=False)

    def undo(self) -> None:
        """Put the layers of before in their places, with the weights that they have now."""
        for parent, name, original in self._originals:
            float8 = getattr(parent, name)
            original.weight, original.bias = float8.weight, float8.bias
            original.train(float8.training)
            setattr(parent, name, original)


def convert_to_float8(
    module: nn.Module,
    *,
    recipe: Recipe,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    all_gather: bool = False,
    emulate: bool = False,
) -> Float8Conversion:
    """Swap linear layers of ``module``, in place, for ones that multiply in float8; names and weights stay.

    Left out, each with its reason, are layers whose dimensions are no multiples of 16, layers with a forward of their
    own, layers whose weights a parent reads, and, unless ``head`` or ``include`` says otherwise, layers outside the
    blocks that repeat.

    Args:
        module: The module.
        recipe: ``"tensorwise"``, the fastest; ``"rowwise"``, finer scales; ``"rowwise_with_gw_hp"``, whose gradients
            of weights stay in high precision.
        include: Patterns of names of linear layers. None: those in the blocks.
        exclude: Patterns of names that stay as they are.
        head: Also convert linear layers outside the blocks, such as the head of a language model.
        all_gather: Let FSDP2 gather weights in float8. Each weight becomes another Parameter.
        emulate: Compute in high precision what float8 would, on any device.

    Raises:
        ValueError: If a pattern matches nothing, if nothing can be converted, or if ``recipe`` cannot be gathered.
    """
    check_recipe(recipe, all_gather=all_gather)
    linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    wanted, reasons = _choose(module, linears, include=include, exclude=exclude, head=head)
    chosen = {name: linears[name] for name in wanted if name not in reasons}
    if not chosen:
        some = "; ".join(f"{name}: {why}" for name, why in [*reasons.items()][:4])
        raise ValueError(
            f"No linear layer of {type(module).__name__} can compute in float8."
            f" {some or 'It has none'}."
            " Name others by include=[...], or use BF16Precision."
        )
    config = _config(recipe, all_gather=all_gather, emulate=emulate)
    originals = [_swap(module, name, linear, config) for name, linear in chosen.items()]
    return Float8Conversion(converted=tuple(chosen), skipped=reasons, _originals=originals)


def check_recipe(recipe: str, *, all_gather: bool) -> None:
    """Refuse an unknown ``recipe``, and one whose weights cannot be gathered in float8.

    Raises:
        ValueError: If it is either.
    """
    if recipe not in get_args(Recipe):
        raise ValueError(
            f"The float8 recipe {recipe!r} is not a known one."
            " A recipe says how values are scaled into the range of float8."
            f" Use one of {get_args(Recipe)}."
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


def precompute_scales(module: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers in float8, with one reduction for all of them."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(module)


def _choose(
    module: nn.Module,
    linears: Mapping[str, nn.Linear],
    *,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    head: bool,
) -> tuple[list[str], dict[str, str]]:
    of = type(module).__name__
    excluded = select_names(linears, exclude, kind="linear layer", of=of) if exclude else {}
    included = list(linears if include is None else select_names(linears, include, kind="linear layer", of=of))
    reasons = {name: f"excluded by {pattern!r}" for name, pattern in excluded.items()}
    if include is None and not head:
        inside = _in_blocks(module)
        reasons |= {name: "outside the blocks" for name, linear in linears.items() if linear not in inside}
    for name in included:
        if name not in reasons and (why := _unfit(linears[name])):
            reasons[name] = why
    return included, reasons


def _in_blocks(module: nn.Module) -> set[nn.Module]:
    return {inner for block in find_blocks(module).values() for inner in block.modules()}


def _unfit(linear: nn.Linear) -> str | None:
    if _is_float8(linear):
        return "converted already"
    if type(linear).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        return "has a forward of its own"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    rest = [size for size in (linear.in_features, linear.out_features) if size % MULTIPLE]
    return f"{linear.in_features} x {linear.out_features} is no multiple of {MULTIPLE}" if rest else None


def _swap(module: nn.Module, name: str, linear: nn.Linear, config: Any) -> tuple[nn.Module, str, nn.Linear]:
    parent_name, _, last = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    float8 = _torchao_linear().from_float(linear, config=config)
    float8.train(linear.training)
    _take_over(float8, linear)
    setattr(parent, last, float8)
    return parent, last, linear


def _take_over(float8: nn.Module, linear: nn.Linear) -> None:
    # Torchao makes a new layer with nothing but the weights. What users hang on one stays on it, ...
    for table in _HOOK_TABLES:
        getattr(float8, table).update(getattr(linear, table))
    # ... and so does what a subclass says of its initialisation, which on the meta device is yet to come.
    for name in vars(linear).keys() - vars(float8).keys():
        setattr(float8, name, vars(linear)[name])
    if type(linear).reset_parameters is not nn.Linear.reset_parameters:
        object.__setattr__(float8, "reset_parameters", MethodType(type(linear).reset_parameters, float8))


def _config(recipe: Recipe, *, all_gather: bool, emulate: bool) -> Any:
    config = _torchao().Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=emulate, pad_inner_dim=True)


def _is_float8(module: nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear"


def _torchao() -> Any:
    return require("torchao.float8", requirement="torchao>=0.17", extra="float8", feature=FEATURE)


def _torchao_linear() -> Any:
    return require(
        "torchao.float8.float8_linear", requirement="torchao>=0.17", extra="float8", feature=FEATURE
    ).Float8Linear
