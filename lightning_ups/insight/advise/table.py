"""Times of matrix products, kept in a file for one kind of GPU and one set of versions."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from lightning_ups._compat.environment import versions
from lightning_ups.insight.advise.shapes import Product

__all__ = ["BFLOAT16", "Table", "Timer", "Times", "cache_path", "obtain_table", "where"]

BFLOAT16 = "bfloat16"
# How a layer casts, to what, and how `compiler_settings` compiles it: another name when that changes.
_CASTS = "kernels, written, rows, e4m3"
_FORMAT = "lightning_ups float8 table 1"
_WHAT_DECIDES = ("torch", "cuda", "triton", "torchao", "transformer-engine")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of the three products of a linear layer, the casts that each needs included.

    Args:
        forward_ms: Of the output.
        dgrad_ms: Of the gradient of the input.
        wgrad_ms: Of that of the weight.
        doubt: What shows that others used the device meanwhile; empty: nothing does.
    """

    forward_ms: float
    dgrad_ms: float
    wgrad_ms: float
    doubt: str = ""

    @property
    def total_ms(self) -> float:
        """All three."""
        return self.of(dgrad=True, wgrad=True)

    def of(self, *, dgrad: bool, wgrad: bool) -> float:
        """Return what the forward takes, and those gradients that are computed."""
        return self.forward_ms + (self.dgrad_ms if dgrad else 0.0) + (self.wgrad_ms if wgrad else 0.0)


Timer = Callable[[Product, str], Times]


@dataclass
class Table:
    """Times by shape and recipe, of one device.

    Args:
        place: The device and the versions that the times are of.
        times: Times by shape, and by ``"bfloat16"`` or the name of a recipe.
    """

    place: Mapping[str, str]
    times: dict[Product, dict[str, Times]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the table in a file.

        Raises:
            FileNotFoundError: If it cannot be read.
            ValueError: If the file is not one of these.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise FileNotFoundError(
                f"The table of float8 times at {path} cannot be read: {error.strerror}."
                " Such a file is written by `advise` on a GPU, which says where."
                " Give the path of one, or leave it out, on a GPU, to time what is missing."
            ) from error
        try:
            tree: Any = json.loads(content)
            if tree["format"] != _FORMAT:
                raise ValueError(tree["format"])
            times = {
                _product(row["shape"]): {name: _times(parts) for name, parts in row["times"].items()}
                for row in tree["products"]
            }
            return cls(tree["place"], times)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a table of float8 times."
                f" It is written by `advise` on a GPU, and this file has another content ({error!r})."
                " Delete it, or give another path."
            ) from error

    def write(self, path: str | Path) -> None:
        """Write it, whole or not at all; times that are in doubt are left out, to be taken anew."""
        kept = {p: {name: _parts(t) for name, t in by.items() if not t.doubt} for p, by in sorted(self.times.items())}
        products = [{"shape": _shape(p), "times": by} for p, by in kept.items() if by]
        text = json.dumps({"format": _FORMAT, "place": dict(self.place), "products": products}, indent=1)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.replace(name, path)

    def joined(self, other: Self) -> Self:
        """Return a table of both; where both have a time, that of ``other``."""
        both = {p: {**self.times.get(p, {}), **other.times.get(p, {})} for p in (*self.times, *other.times)}
        return type(self)(other.place, both)

    def missing(self, products: Iterable[Product], recipes: Iterable[str]) -> list[tuple[Product, str]]:
        """Return what of ``products`` is not timed yet, in bfloat16 and by ``recipes``."""
        names = [BFLOAT16, *recipes]
        return [(p, name) for p in products for name in names if name not in self.times.get(p, {})]

    def recipes_of(self, products: Iterable[Product]) -> list[str]:
        """Return the recipes by which all ``products`` are timed, as in bfloat16."""
        timed = [self.times.get(p, {}) for p in products]
        return [name for name in timed[0] if name != BFLOAT16 and all({name, BFLOAT16} <= by.keys() for by in timed)]

    def fill(self, products: Iterable[Product], recipes: Iterable[str], timer: Timer) -> int:
        """Time what is missing, and return how much that was."""
        missing = self.missing(products, recipes)
        for product, name in missing:
            self.times.setdefault(product, {})[name] = timer(product, name)
        return len(missing)


def _times(parts: Mapping[str, Any]) -> Times:
    forward, dgrad, wgrad = (float(parts[name]) for name in ("forward_ms", "dgrad_ms", "wgrad_ms"))
    return Times(forward_ms=forward, dgrad_ms=dgrad, wgrad_ms=wgrad)


def _parts(times: Times) -> dict[str, float]:
    return {name: value for name, value in vars(times).items() if name != "doubt"}


def _shape(product: Product) -> list[Any]:
    shape: list[Any] = [product.rows, product.in_features, product.out_features]
    return shape if product.is_plain else [*shape, product.norm, product.activation, [*product.split]]


def _product(shape: Sequence[Any]) -> Product:
    rows, wide, narrow, *fused = shape
    return Product(rows, wide, narrow, *fused[:2], split=tuple(fused[2]) if fused else ())


def obtain_table(
    products: Iterable[Product],
    recipes: Sequence[str],
    *,
    device: torch.device,
    path: str | Path | None = None,
    timer: Timer | None = None,
) -> Table:
    """Return a table that has ``products``, in bfloat16 and by ``recipes``.

    Args:
        products: Shapes.
        recipes: Recipes.
        device: The device of the run.
        path: A file with a table, which need not be of this device. None: the user's cache for this device and these
            versions, to which what is timed now is added.
        timer: Times a product that is in no table. None: there is none here.

    Raises:
        FileNotFoundError: If ``path`` cannot be read.
        ValueError: If the file is no table, or lacks a shape.
        RuntimeError: If nothing can be timed here.
    """
    products = [*products]
    place = where(device)
    cached = cache_path(place)
    read = Path(path) if path is not None else cached
    table = Table.read(read) if path is not None or cached.exists() else Table(place)
    missing = table.missing(products, recipes)
    if missing and path is not None:
        raise ValueError(
            f"{path} has no time of {missing[0][0]} by {missing[0][1]}, and {len(missing) - 1} others."
            f" A table has the shapes of the model for which it was made; this one is of {table.place.get('device')}."
            f" Leave the path out, on a GPU, to time what is missing{_or_of(table.recipes_of(products))}."
        )
    if missing and timer is None:
        raise RuntimeError(
            f"Nothing can be timed on this device: {place['device']}."
            " Whether float8 is faster depends on the GPU, and is measured there."
            " Run this on the GPU that will train, or give a table that `advise` wrote there."
        )
    if missing and timer is not None:
        table.fill(products, recipes, timer)
        table.write(cached)
    return table


def _or_of(recipes: Sequence[str]) -> str:
    return f"; or ask for a recipe that it has: {', '.join(recipes)}" if recipes else ""


def where(device: torch.device) -> dict[str, str]:
    """Return what times depend on: the device, the versions of what makes kernels for it, and how we ask for them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = versions()
    decides = {package: found[package] for package in _WHAT_DECIDES if package in found}
    return {"device": name} | decides | {"casts": _CASTS}


def cache_path(place: Mapping[str, str]) -> Path:
    """Return the file for ``place``, below the user's folder for caches."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ups" / "float8"
    return root / ("_".join(_plain(value) for value in place.values()) + ".json")


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".+" else "-" for letter in text)
