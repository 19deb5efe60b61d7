"""The matrix products that a model really has: how many rows each of its linear layers gets, and how often."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ups.insight.dry_run import NotCopiedError, call_training_step, plain_run

__all__ = ["Layer", "Product", "check_ran", "layers_in_step", "layers_with_rows", "names_of", "products_of"]


@dataclass(frozen=True, order=True)
class Product:
    """The shape of what one call of a linear layer multiplies, or of several that Transformer Engine computes as one.

    Args:
        rows: Of the input: tokens, mostly.
        in_features: Columns of the input.
        out_features: Columns of the output; of layers that are one product, all together.
        norm: What is computed with it, before: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: Of a whole feed-forward network, up to ``out_features`` and back, by Transformer Engine's name.
        split: The columns of each of several layers that are one product.
    """

    rows: int
    in_features: int
    out_features: int
    norm: str = ""
    activation: str = ""
    split: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is that of a linear layer, and nothing else."""
        return not (self.norm or self.activation or self.split)

    @property
    def gated(self) -> bool:
        """Whether it is a feed-forward network of three layers, of which one is a gate."""
        return self.activation.endswith("glu")

    @property
    def flops(self) -> int:
        """Operations of forward, the gradient of the input and that of the weight."""
        count = 1 if not self.activation else 3 if self.gated else 2
        return 6 * count * self.rows * self.in_features * self.out_features

    def __str__(self) -> str:
        whole = f"{self.rows} x {self.in_features} x {self.out_features}"
        network = f" by {self.activation} and back" if self.activation else ""
        return f"{whole}{network}{f' after {self.norm}' if self.norm else ''}"


@dataclass(frozen=True)
class Layer:
    """A linear layer, and what it multiplies in one step of training.

    Args:
        name: Its name in the model.
        calls: How often it multiplies each shape.
        dgrad: Whether the gradient of its input is computed; not, where nothing before it is trained.
        wgrad: Whether that of its weight is; not, where that is frozen.
    """

    name: str
    calls: Mapping[Product, int]
    dgrad: bool = True
    wgrad: bool = True


def layers_in_step(module: nn.Module, names: Iterable[str], batch: Any) -> list[Layer]:
    """Return the linear layers of ``names`` that a training step of ``module`` with ``batch`` calls.

    Raises:
        ValueError: If the step cannot run on fake tensors.
    """
    calls: dict[str, Counter[Product]] = {name: Counter() for name in names}
    passing: set[str] = set()  # those that pass a gradient on
    try:
        with plain_run(module, batch) as dry_run, ExitStack() as stack:
            linears: dict[str, Any] = {name: dry_run.module.get_submodule(name) for name in calls}
            for name, linear in linears.items():
                hook = _count(calls[name], passes_on=partial(passing.add, name))
                stack.callback(linear.register_forward_pre_hook(hook, with_kwargs=True).remove)
            call_training_step(dry_run.module, dry_run.batch)
    except NotCopiedError as error:
        raise ValueError(_refusal(module, f"it uses {error}")) from error
    except Exception as error:
        raise ValueError(_refusal(module, (str(error) or repr(error)).splitlines()[0].rstrip("."))) from error
    return [
        Layer(name, dict(counted), dgrad=name in passing, wgrad=linears[name].weight.requires_grad)
        for name, counted in calls.items()
        if counted
    ]


def _refusal(module: nn.Module, reason: str) -> str:
    return (
        f"{type(module).__name__}.training_step failed on fake tensors: {reason}."
        " If it fails in fit as well, fix it there. Otherwise give the number of rows of its linear layers: tokens=...,"
        " usually batch size times sequence length."
    )


def check_ran(layers: Sequence[Layer], *, linears: Iterable[str], of: str, tokens: str) -> None:
    """Refuse to decide about ``linears`` of which none ran.

    Args:
        layers: Those that ran.
        linears: Those that could have.
        of: The class of the model.
        tokens: How the number of rows is given.

    Raises:
        ValueError: If there are no ``layers``.
    """
    if not layers:
        raise ValueError(
            f"No linear layer of {of} ran in a training step with the first batch."
            f" {next(iter(linears))} could compute in float8, and how much it multiplies is not known."
            f" Say how many rows linear layers get: {tokens}, mostly batch size times sequence length."
        )


def layers_with_rows(linears: Mapping[str, nn.Linear], rows: int) -> list[Layer]:
    """Return ``linears`` as if each were called once in a step, with so many ``rows``."""
    return [
        Layer(name, {Product(rows, m.in_features, m.out_features): 1}, wgrad=m.weight.requires_grad)
        for name, m in linears.items()
    ]


def _count(
    into: "Counter[Product]", *, passes_on: Callable[[], Any]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        features: Any = linear.in_features, linear.out_features
        into[Product(x.numel() // max(x.shape[-1], 1), *features)] += 1
        if x.requires_grad or not torch.is_grad_enabled():  # a checkpoint may run it so, and again for backward
            passes_on()

    return hook


def products_of(layers: Iterable[Layer]) -> dict[Product, int]:
    """Return each shape that ``layers`` multiply, and how often in all."""
    total: Counter[Product] = Counter()
    for layer in layers:
        total.update(layer.calls)
    return dict(sorted(total.items()))


def names_of(layers: Iterable[Layer], product: Product) -> str:
    """Return which of ``layers`` multiply ``product``; numbers in which names differ are shown as ``*``."""
    groups: dict[str, list[list[str]]] = {}
    for layer in layers:
        if product in layer.calls:
            parts = layer.name.split(".")
            groups.setdefault(".".join("*" if part.isdecimal() else part for part in parts), []).append(parts)
    patterns = [
        ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*group, strict=True))
        for group in groups.values()
    ]
    return ", ".join(patterns[:3]) + (", ..." if len(patterns) > 3 else "")
