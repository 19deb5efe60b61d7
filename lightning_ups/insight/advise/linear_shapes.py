"""The matrix products of a training step: the rows of each linear layer, and how often it runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ups.insight.dry_run import NotCopiedError, call_training_step, plain_run


@dataclass(frozen=True, order=True)
class Product:
    """The shape of one call of a linear layer, or of several layers that Transformer Engine fuses.

    Args:
        rows: Rows of the input, usually tokens.
        in_features: Columns of the input.
        out_features: Columns of the output, of all fused layers together.
        norm: The norm that is fused before it: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: The activation of a fused feed-forward network, by Transformer Engine's name.
        split: The output columns of each fused layer.
    """

    rows: int
    in_features: int
    out_features: int
    norm: str = ""
    activation: str = ""
    split: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is a single linear layer."""
        return not (self.norm or self.activation or self.split)

    @property
    def gated(self) -> bool:
        """Whether it is a feed-forward network with a gate."""
        return self.activation.endswith("glu")

    @property
    def flops(self) -> int:
        """FLOPs of forward, the input gradient and the weight gradient."""
        count = 1 if not self.activation else 3 if self.gated else 2
        return 6 * count * self.rows * self.in_features * self.out_features

    def __str__(self) -> str:
        whole = f"{self.rows} x {self.in_features} x {self.out_features}"
        network = f" by {self.activation} and back" if self.activation else ""
        return f"{whole}{network}{f' after {self.norm}' if self.norm else ''}"


@dataclass(frozen=True)
class Layer:
    """A linear layer and its products in one training step.

    Args:
        name: Its name in the model.
        calls: The number of calls by shape.
        dgrad: Whether the gradient of its input is computed: not if nothing before it is trained.
        wgrad: Whether the gradient of its weight is computed: not if it is frozen.
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
    """Raise if none of ``linears`` ran.

    Args:
        layers: The layers that ran.
        linears: The names of all layers.
        of: The class of the model.
        tokens: The option for the number of rows.

    Raises:
        ValueError: If there are no ``layers``.
    """
    if not layers:
        raise ValueError(
            f"No linear layer of {of} ran in a training step with the first batch, so that the rows of"
            f" {next(iter(linears))} are unknown. Give them: {tokens}, usually batch size times sequence length."
        )


def layers_with_rows(linears: Mapping[str, nn.Linear], rows: int) -> list[Layer]:
    """Return ``linears`` with one call of ``rows`` rows each."""
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
        if x.requires_grad or not torch.is_grad_enabled():  # a reentrant checkpoint, which runs it again for backward
            passes_on()

    return hook


def products_of(layers: Iterable[Layer]) -> dict[Product, int]:
    """Return the number of calls of ``layers`` by shape."""
    total: Counter[Product] = Counter()
    for layer in layers:
        total.update(layer.calls)
    return dict(sorted(total.items()))


def names_of(layers: Iterable[Layer], product: Product) -> str:
    """Return the names of ``layers`` with this product; differing numbers are shown as ``*``."""
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
