"""Transformer Engine modules that compute with the parameters of torch modules.

A linear layer, a norm or a feed-forward network stays where it is, with its parameters and names; only its forward is
replaced. Optimizers, sharding, initialization and checkpoints therefore see the original model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ups._compat.optional.te import engine, mark_fsdp2, out_of_sight

# Activations of transformers that multiply in the dtype of the input, as Transformer Engine does before it rounds.
_RMS = frozenset(
    f"{name}RMSNorm" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Phi3", "Granite", "Olmo2")
)
_ZERO_CENTERED = frozenset(f"{name}RMSNorm" for name in ("Gemma", "Gemma2", "Gemma3"))


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of a parameter: its module, its name there, and its name in the model."""

    owner: nn.Module
    attribute: str
    name: str

    @property
    def value(self) -> nn.Parameter:
        """The current parameter, which FSDP2 and others may replace."""
        return getattr(self.owner, self.attribute)


class Borrower:
    """A Transformer Engine module that computes with the parameters of other modules.

    Args:
        module: The module, created on the meta device.
        slots: For each of its parameters, the parameters of the model; several are stacked along the rows.
        num_products: The number of its matrix products.
        sharded: Whether FSDP2 gathers the parameters.
    """

    def __init__(
        self, module: nn.Module, slots: Mapping[str, Sequence[Slot]], *, num_products: int, sharded: bool
    ) -> None:
        self.module, self.num_products = module, num_products
        self.slots = {name: tuple(of) for name, of in slots.items()}
        self.was_quantizing = False  # in its last forward that was no recomputation
        if sharded:
            mark_fsdp2(module)
        for name in self.slots:
            module._parameters[name] = None  # the module's own parameter is not needed

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    def __call__(self, value: Tensor) -> Any:
        """Compute the module's output."""
        self._borrow()
        try:
            with out_of_sight():
                return self.module(value)
        finally:
            self._let_go()

    def _borrow(self) -> None:
        for name, slots in self.slots.items():
            # Not with setattr: a joined weight is no Parameter.
            self.module._parameters[name] = joined([slot.value for slot in slots])  # pyright: ignore[reportArgumentType]

    def _let_go(self) -> None:
        for name, slots in self.slots.items():
            if len(slots) > 1:  # would keep its graph alive; norms read the others in backward
                self.module._parameters[name] = None


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The properties of a norm that Transformer Engine needs."""

    kind: str
    eps: float
    zero_centered: bool

    @property
    def within_products(self) -> dict[str, Any]:
        """The arguments of a module that computes it within its products."""
        return {"normalization": self.kind, "eps": self.eps, "zero_centered_gamma": self.zero_centered}

    @classmethod
    def of(cls, module: nn.Module) -> "Norm | str | None":
        """Return them; or why Transformer Engine has no such norm; or None if ``module`` is not a norm."""
        name = type(module).__name__
        if type(module) is nn.LayerNorm:
            if not module.elementwise_affine or module.bias is None:
                return "a LayerNorm without weight or bias"
            return cls(kind="LayerNorm", eps=module.eps, zero_centered=False)
        if type(module) is nn.RMSNorm:
            if not module.elementwise_affine:
                return "an RMSNorm without a weight"
            if module.eps is None:
                return "its eps is None, which depends on the type of the input"
            return cls(kind="RMSNorm", eps=module.eps, zero_centered=False)
        if (name in _RMS or name in _ZERO_CENTERED) and getattr(module, "weight", None) is not None:
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            assert isinstance(eps, float)
            return cls(kind="RMSNorm", eps=eps, zero_centered=name in _ZERO_CENTERED)
        return None


def linear_for(linear: nn.Linear, *, name: str, sharded: bool) -> Borrower:
    """Return a ``te.Linear`` for ``linear``."""
    module = engine().Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    return Borrower(module, _slots({name: linear}), num_products=1, sharded=sharded)


def norm_for(norm: nn.Module, *, name: str, sharded: bool) -> Borrower:
    """Return a ``te.LayerNorm`` or ``te.RMSNorm`` for ``norm``."""
    what = _known(norm)
    weight: Any = norm.weight
    module = getattr(engine(), what.kind)(
        tuple(weight.shape), eps=what.eps, zero_centered_gamma=what.zero_centered, device="meta", dtype=weight.dtype
    )
    return Borrower(module, _slots({name: norm}), num_products=0, sharded=sharded)


def norm_linear_for(norm: tuple[str, nn.Module], linears: Mapping[str, nn.Linear], *, sharded: bool) -> Borrower:
    """Return a ``te.LayerNormLinear`` for a norm and the linear layers that read it, stacked along the rows."""
    what, first = _known(norm[1]), next(iter(linears.values()))
    module = engine().LayerNormLinear(
        first.in_features,
        sum(linear.out_features for linear in linears.values()),
        **what.within_products,
        bias=first.bias is not None,
        params_dtype=first.weight.dtype,
        device="meta",
    )
    slots = _slots(dict([norm]), prefix="layer_norm_") | _slots(linears)
    return Borrower(module, slots, num_products=1, sharded=sharded)


def norm_mlp_for(
    norm: tuple[str, nn.Module],
    first: Mapping[str, nn.Linear],
    second: tuple[str, nn.Linear],
    *,
    activation: str,
    sharded: bool,
) -> Borrower:
    """Return a ``te.LayerNormMLP``; in a gated one, ``first`` is the activated half followed by the other half."""
    what, last = _known(norm[1]), second[1]
    module = engine().LayerNormMLP(
        last.out_features,
        last.in_features,
        **what.within_products,
        bias=last.bias is not None,
        activation=activation,
        params_dtype=last.weight.dtype,
        device="meta",
    )
    slots = _slots(dict([norm]), prefix="layer_norm_") | _slots(first, prefix="fc1_")
    return Borrower(module, slots | _slots(dict([second]), prefix="fc2_"), num_products=2, sharded=sharded)


def lay_together(slots: Sequence[Slot]) -> None:
    """Give parameters one memory, stacked along the rows, so that joining them copies nothing."""
    parameters = [slot.value for slot in slots]
    if _are_together(parameters) or len({(p.dtype, p.device) for p in parameters}) > 1:
        return
    parts = torch.cat([p.data for p in parameters]).split([len(p) for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return ``parts`` stacked along the rows: a view if they are adjacent in memory."""
    if len(parts) == 1:
        return parts[0]
    return _Joined.apply(*parts) if _are_together(parts) else torch.cat([*parts])  # pyright: ignore[reportReturnType]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes, first = [len(part) for part in parts], parts[0]
        # Not as_strided: autograd would treat its result as a view of the first part, which is shorter.
        return first.new_empty(0).set_(
            first.untyped_storage(), first.storage_offset(), (sum(ctx.sizes), *first.shape[1:]), first.stride()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(gradients[0].split(ctx.sizes))


def _are_together(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    if any(p.is_meta or not p.is_contiguous() or p.dtype != first.dtype for p in parts):
        return False
    place = first.data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != place:
            return False
        place += part.numel() * part.element_size()
    return True


def _slots(modules: Mapping[str, nn.Module], *, prefix: str = "") -> dict[str, tuple[Slot, ...]]:
    found: dict[str, tuple[Slot, ...]] = {}
    for attribute in ("weight", "bias"):
        slots = [
            Slot(owner=module, attribute=attribute, name=f"{name}.{attribute}")
            for name, module in modules.items()
            if getattr(module, attribute, None) is not None
        ]
        if slots:
            found[prefix + attribute] = tuple(slots)
    return found


def _known(norm: nn.Module) -> Norm:
    what = Norm.of(norm)
    assert isinstance(what, Norm)
    return what
