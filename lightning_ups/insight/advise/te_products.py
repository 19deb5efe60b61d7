"""The products that Transformer Engine would compute in a model, fused or not, and modules to time them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.optional.te import autocast
from lightning_ups.insight.advise.linear_shapes import Layer, Product
from lightning_ups.transforms.te import (
    RECIPES,
    Borrower,
    TEConversion,
    lay_together,
    linear_for,
    norm_linear_for,
    norm_mlp_for,
)

_PREFIX = "te-"  # in tables and commands, next to torchao's recipes
ENGINE = tuple(_PREFIX + name for name in RECIPES)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "reglu": F.relu,
    "glu": torch.sigmoid,
}


def is_engine(name: str) -> bool:
    """Return whether this is the name of a Transformer Engine recipe."""
    return name.startswith(_PREFIX)


def engine_name(recipe: str) -> str:
    """Return the name of a Transformer Engine recipe in tables and commands."""
    return _PREFIX + recipe


def engine_recipe(name: str) -> str:
    """Return the Transformer Engine recipe of a name in tables and commands."""
    return name.removeprefix(_PREFIX)


# The products of a model


def modules_of(conversion: TEConversion) -> dict[str, list[str]]:
    """Return the modules that each Transformer Engine module with products computes."""
    return {
        name: [*dict.fromkeys([name, *(_owner(slot.name) for slots in borrower.slots.values() for slot in slots)])]
        for name, borrower in conversion.borrowers.items()
        if borrower.num_products
    }


def read_first(conversion: TEConversion) -> dict[str, str]:
    """Return the linear layer with the same input as each Transformer Engine module with products."""
    return {
        name: _owner(_first_slots(borrower)[0].name)
        for name, borrower in conversion.borrowers.items()
        if borrower.num_products
    }


def engine_layers(conversion: TEConversion, called: Iterable[Layer]) -> tuple[list[Layer], dict[str, str]]:
    """Return the Transformer Engine modules that would run in a step, as layers, and why others would not, by name.

    Args:
        conversion: The planned conversion.
        called: The linear layers that the step called, among them those of `read_first`.
    """
    found, rows = {layer.name: layer for layer in called}, conversion.calls.rows
    layers: list[Layer] = []
    others: dict[str, str] = {}
    for name, first in read_first(conversion).items():
        if first not in found:
            others[name] = "does not run in a training step"
        elif odd := [p.rows for p in found[first].calls if p.rows % rows]:
            others[name] = f"gets {odd[0]} rows, which is no multiple of {rows}"
        else:
            borrower, calls = conversion.borrowers[name], found[first].calls
            products = {_product(borrower, p.rows): count for p, count in calls.items()}
            layers.append(replace(found[first], name=name, calls=products))
    return layers, others


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _first_slots(borrower: Borrower) -> Any:
    return borrower.slots.get("fc1_weight") or borrower.slots["weight"]


def _product(borrower: Borrower, rows: int) -> Product:
    module: Any = borrower.module
    sizes = [tuple(slot.value.shape) for slot in _first_slots(borrower)]
    alone = Product(rows, sizes[0][1], sum(size[0] for size in sizes))
    if borrower.kind == "Linear":
        return alone
    if borrower.kind == "LayerNormLinear":
        split = tuple(size[0] for size in sizes) if len(sizes) > 1 else ()
        return replace(alone, norm=module.normalization, split=split)
    return replace(alone, out_features=sizes[0][0], norm=module.normalization, activation=module.activation)


# Modules to time


class Modules(nn.Module):
    """A product by torch in bfloat16: linear layers after an optional norm."""

    def __init__(self, product: Product, *, device: torch.device) -> None:
        super().__init__()
        self.product = product
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        wide, narrow = product.out_features, product.in_features
        sizes = product.split or (wide,) * (2 if product.gated else 1)
        norms = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
        self.norm = norms[product.norm](narrow, eps=1e-5, **options) if product.norm else None
        self.first = nn.ModuleList(nn.Linear(narrow, size, bias=False, **options) for size in sizes)
        self.second = nn.Linear(wide, narrow, bias=False, **options) if product.activation else None
        self.factors = torch.ones(narrow, **options)

    def forward(self, x: Tensor) -> Any:
        """Return the result, or that of each layer of a fused product."""
        x = x * self.factors if self.norm is None else self.norm(x)
        found = [linear(x) for linear in self.first]
        if self.second is None:
            return tuple(found) if len(found) > 1 else found[0]
        activated = _ACTIVATIONS.get(self.product.activation, F.silu)(found[0])  # all activations take the same time
        return self.second(activated * found[1] if self.product.gated else activated)

    def behind(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return ``layer`` after an elementwise product."""
        factors = self.factors
        return lambda x: layer(x * factors)


def engine_context(name: str) -> AbstractContextManager[Any]:
    """Return the context of Transformer Engine's recipe of this name, without all-reduces of amax."""
    return autocast(RECIPES[engine_recipe(name)].make(), group=None)


def engine_forward(modules: Modules) -> Callable[[Tensor], Any]:
    """Return the forward of ``modules`` by Transformer Engine."""
    product = modules.product
    first: dict[str, Any] = {f"first.{index}": linear for index, linear in enumerate(modules.first)}
    if modules.norm is None:
        (linear,) = first.values()
        alone = linear_for(linear, name="first.0", sharded=False)
        return lambda x: alone(x * modules.factors)
    norm = ("norm", modules.norm)
    if modules.second is None:
        borrower = norm_linear_for(norm, first, sharded=False)
    else:
        second = ("second", modules.second)
        borrower = norm_mlp_for(norm, first, second, activation=product.activation, sharded=False)
    for slots in borrower.slots.values():
        if len(slots) > 1:
            lay_together(slots)
    if not product.split:
        return borrower
    return lambda x: borrower(x).split(product.split, dim=-1)
