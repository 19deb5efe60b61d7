"""Finds norms to fuse with the linear layers that read them, and feed-forward networks to compute as one module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_ups.transforms.blocks import as_patterns, select_names


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A norm and everything that reads its output: linear layers, or a feed-forward network.

    The names are patterns, such as ``model.layers.*.ffn_norm``; ``*`` matches the same text in all of them. Nothing
    else may read the norm's output, because it is not computed separately.

    Args:
        norm: The norm.
        linears: The linear layers that read it, computed as one product.
        mlp: Instead of ``linears``, the feed-forward network that reads it. It consists only of the following parts.
        first: Its linear layers from the norm's width: one or, in a gated network, first the one whose output is
            activated and then the other.
        second: Its linear layer back to that width.
        activation: Its activation, with Transformer Engine's name: ``swiglu``, ``geglu``, ``gelu`` (the tanh
            approximation), ``silu``, ``relu``, ...

    Raises:
        ValueError: If both, neither, or only part of a network is named.
    """

    norm: str
    linears: Sequence[str] = ()
    mlp: str | None = None
    first: Sequence[str] = ()
    second: str | None = None
    activation: str = "swiglu"
    needs: str | None = field(default=None, repr=False)  # the class of the activation module, for known patterns

    def __post_init__(self) -> None:
        as_patterns(self.linears)
        as_patterns(self.first)
        complete = bool(self.first) and self.second is not None
        if bool(self.linears) == (self.mlp is not None) or (self.mlp is not None and not complete):
            raise ValueError(f"{self} is incomplete. Give linears=[...], or mlp=..., first=[...] and second=....")

    @property
    def parts(self) -> tuple[str, ...]:
        """All names except that of the norm."""
        inside = [*self.first, self.second] if self.mlp is not None else []
        return tuple(name for name in (*self.linears, self.mlp, *inside) if name is not None)

    @property
    def joins(self) -> bool:
        """Whether the weights of several layers are joined."""
        return max(len(self.linears), len(self.first)) > 1

    def named(self, rename: Any) -> "Fusion":
        """Return a copy with ``rename`` applied to each name."""
        return replace(
            self,
            norm=rename(self.norm),
            linears=tuple(rename(name) for name in self.linears),
            mlp=None if self.mlp is None else rename(self.mlp),
            first=tuple(rename(name) for name in self.first),
            second=None if self.second is None else rename(self.second),
        )


_OURS = (
    Fusion(norm="attention_norm", linears=("attention.qkv",)),
    Fusion(norm="ffn_norm", mlp="ffn", first=("ffn.gate", "ffn.up"), second="ffn.down"),
)
_LLAMA = (
    Fusion(norm="input_layernorm", linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fusion(
        norm="post_attention_layernorm",
        mlp="mlp",
        first=("mlp.gate_proj", "mlp.up_proj"),
        second="mlp.down_proj",
        needs="SiLU",
    ),
)

# By class name including the module: a class of the same name elsewhere may be different.
READY: Mapping[str, tuple[Fusion, ...]] = MappingProxyType(
    {
        "lightning_ups.models.gpt.Block": _OURS,
        "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
        "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
        "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    }
)


def fusions_in(module: nn.Module, asked: Iterable[Fusion], *, ready: bool) -> Iterator[Fusion]:
    """Yield each fusion in ``module``, with full names: first those of the patterns in ``asked``, then known ones.

    Raises:
        ValueError: If a pattern matches nothing, or if the names of a fusion differ in their number of ``*``.
    """
    modules = dict(module.named_modules())
    for fusion in asked:
        yield from _matches(fusion, modules, of=type(module).__name__)
    for name, block in modules.items() if ready else ():
        # FSDP2 gives modules that an earlier fit sharded another class.
        plain = next(kind for kind in type(block).__mro__ if not issubclass(kind, FSDPModule))
        for fusion in READY.get(f"{plain.__module__}.{plain.__qualname__}", ()):
            found = fusion.named(lambda part, name=name: f"{name}.{part}" if name else part)
            if found.needs is None or found.needs in _activations(modules[found.mlp or ""]):
                yield found


def _activations(mlp: nn.Module) -> set[str]:
    # Transformers has its own version of one of torch's.
    return {type(child).__name__.removesuffix("Activation") for child in mlp.children()}


def _matches(fusion: Fusion, modules: Mapping[str, nn.Module], *, of: str) -> Iterator[Fusion]:
    stars = _stars(fusion.norm)
    for part in fusion.parts:
        if len(_stars(part)) != len(stars):
            raise ValueError(
                f"The patterns {fusion.norm!r} and {part!r} of a fusion have different numbers of '*'."
                " Give each of them the same stars."
            )
    for name in select_names([n for n in modules if n], [fusion.norm], kind="submodule", of=of):
        values = [name.split(".")[place] for place in stars]
        found = fusion.named(lambda pattern, values=values: _filled(pattern, values))
        for part in found.parts:
            select_names([n for n in modules if n], [part], kind="submodule", of=of)
        yield found


def _stars(pattern: str) -> list[int]:
    return [place for place, part in enumerate(pattern.split(".")) if "*" in part]


def _filled(pattern: str, values: Sequence[str]) -> str:
    parts = pattern.split(".")
    for place, value in zip(_stars(pattern), values, strict=True):
        parts[place] = value
    return ".".join(parts)
