"""Times of matrix products, in a file for each kind of GPU and set of versions."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from lightning_ups._compat.environment import versions
from lightning_ups.insight.advise.linear_shapes import Product
from lightning_ups.insight.report import write

BFLOAT16 = "bfloat16"
# How a layer casts and is compiled. Change the name when that changes.
_CASTS = "kernels, written, rows, e4m3"
_FORMAT = "lightning_ups float8 table 1"
_WHAT_DECIDES = ("torch", "cuda", "triton", "torchao", "transformer-engine")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of the three products of a linear layer, including casts.

    Args:
        forward_ms: The output.
        dgrad_ms: The gradient of the input.
        wgrad_ms: The gradient of the weight.
        doubt: Evidence of other load on the device; empty: none.
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
        """Return the time of the forward and of the computed gradients."""
        return self.forward_ms + (self.dgrad_ms if dgrad else 0.0) + (self.wgrad_ms if wgrad else 0.0)


Timer = Callable[[Product, str], Times]


@dataclass
class Table:
    """Times by shape and recipe, of one device.

    Args:
        place: The device and the versions.
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
                " Give the path of a table written by `advise`, or omit it on a GPU to measure the times."
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
                f"{path} is not a table of float8 times, as `advise` writes it ({error!r})."
                " Delete it, or give another path."
            ) from error

    def write(self, path: str | Path) -> None:
        """Write the table atomically, without doubtful times, which are measured again."""
        kept = {p: {name: _parts(t) for name, t in by.items() if not t.doubt} for p, by in sorted(self.times.items())}
        products = [{"shape": _shape(p), "times": by} for p, by in kept.items() if by]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write({"format": _FORMAT, "place": dict(self.place), "products": products}, Path(path))

    def joined(self, other: Self) -> Self:
        """Return a table with the times of both, preferring ``other``."""
        both = {p: {**self.times.get(p, {}), **other.times.get(p, {})} for p in (*self.times, *other.times)}
        return type(self)(other.place, both)

    def missing(self, products: Iterable[Product], recipes: Iterable[str]) -> list[tuple[Product, str]]:
        """Return the products and recipes without times, bfloat16 included."""
        names = [BFLOAT16, *recipes]
        return [(p, name) for p in products for name in names if name not in self.times.get(p, {})]

    def fill(self, products: Iterable[Product], recipes: Iterable[str], timer: Timer) -> None:
        """Measure missing times."""
        for product, name in self.missing(products, recipes):
            self.times.setdefault(product, {})[name] = timer(product, name)


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
    """Return a table with the times of ``products`` in bfloat16 and by ``recipes``.

    Args:
        products: The shapes.
        recipes: The recipes.
        device: The device of the run.
        path: A file with a table, possibly of another device. None: the user's cache for this device and these
            versions, to which new times are added.
        timer: Times a missing product. None: not possible here.

    Raises:
        FileNotFoundError: If ``path`` cannot be read.
        ValueError: If the file is not a table, or lacks a shape.
        RuntimeError: If times are missing and cannot be measured here.
    """
    products = [*products]
    place = where(device)
    cached = cache_path(place)
    read = Path(path) if path is not None else cached
    table = Table.read(read) if path is not None or cached.exists() else Table(place)
    missing = table.missing(products, recipes)
    if missing and path is not None:
        raise ValueError(
            f"{path}, a table for {table.place.get('device')}, has no time of {missing[0][0]} by {missing[0][1]} and of"
            f" {len(missing) - 1} others. Omit the path on a GPU to measure them."
        )
    if missing and timer is None:
        raise RuntimeError(
            f"Float8 cannot be timed on this device: {place['device']}."
            " Run this on the GPU that will train, or give a table that `advise` wrote there."
        )
    if missing and timer is not None:
        table.fill(products, recipes, timer)
        table.write(cached)
    return table


def where(device: torch.device) -> dict[str, str]:
    """Return what times depend on: the device, the versions of packages with kernels, and how layers are compiled."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = versions()
    decides = {package: found[package] for package in _WHAT_DECIDES if package in found}
    return {"device": name} | decides | {"casts": _CASTS}


def cache_path(place: Mapping[str, str]) -> Path:
    """Return the file for ``place`` in the user's cache folder."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ups" / "float8"
    return root / ("_".join(_plain(value) for value in place.values()) + ".json")


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".+" else "-" for letter in text)
