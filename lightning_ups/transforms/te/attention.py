"""Attention by Transformer Engine, in float8 if its recipe says so, in place of torch's function.

Shape suffixes: B batch, T position, H query heads, K heads of keys and values, E width of a head.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ups._compat.optional.te import attention_for, begin_attention_scales, is_quantizing
from lightning_ups.transforms.forward import Forward, replaced_forward
from lightning_ups.transforms.te.recipes import Recipe

__all__ = ["EngineAttention", "engine_attention"]


class EngineAttention:
    """The modules of Transformer Engine that replace attention calls, by block and call order."""

    def __init__(self, recipe: Recipe, made: Any) -> None:
        self.modules: dict[tuple[str, int], Any] = {}
        self.total = 0
        self._recipe, self._made = recipe, made

    def module(self, key: tuple[str, int], q_BHTE: Tensor, k_BKTE: Tensor, scale: float | None) -> Any:
        """Return the module for this call, created in the first call."""
        if key not in self.modules:
            self._check_width(key[0], q_BHTE)
            made = attention_for(q_BHTE.shape[1], q_BHTE.shape[3], groups=k_BKTE.shape[1], scale=scale)
            self.modules[key] = made.to(q_BHTE.device)
            if self._recipe.keeps_scales:
                begin_attention_scales(made, recipe=self._made)
        return self.modules[key]

    def _check_width(self, block: str, q_BHTE: Tensor) -> None:
        if why := self._recipe.why_no_attention(q_BHTE.device, width=q_BHTE.shape[3]):
            raise ValueError(
                f"{block} calls attention that cannot be computed in float8: {why}."
                " Use TEPrecision(fp8_attention=False)."
            )


@contextmanager
def engine_attention(blocks: Mapping[str, nn.Module], recipe: Recipe, made: Any) -> Iterator[EngineAttention]:
    """Let Transformer Engine compute the calls of ``scaled_dot_product_attention`` in ``blocks``, in its autocast.

    Attention that is not causal, or that has a mask or dropout, raises an error, since it would silently compute
    something else. So does attention without a kernel.

    Args:
        blocks: Modules by name.
        recipe: The recipe.
        made: Transformer Engine's object for the recipe.
    """
    attention = EngineAttention(recipe, made)
    with ExitStack() as undo:
        for name, block in blocks.items():
            undo.enter_context(replaced_forward(block, lambda inner, name=name: _routed(inner, name, attention)))
        yield attention


def _routed(inner: Forward, name: str, attention: EngineAttention) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_quantizing():
            return inner(self, *args, **kwargs)
        with _Routing(name, attention):
            return inner(self, *args, **kwargs)

    return forward


class _Routing(TorchFunctionMode):
    def __init__(self, block: str, attention: EngineAttention) -> None:
        super().__init__()
        self._block, self._attention, self._count = block, attention, 0

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self._count += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        if attn_mask is not None or dropout_p or not is_causal:
            raise ValueError(
                f"{self._block} calls attention that float8 does not support: is_causal={is_causal},"
                f" {'with' if attn_mask is not None else 'without'} a mask, dropout {dropout_p}."
                " Use fp8_attention=False."
            )
        module = self._attention.module((self._block, self._count), query, key, scale)
        self._attention.total += 1
        try:
            out_BTD = module(*(heads.transpose(1, 2) for heads in (query, key, value)))
        except ValueError as error:  # there is no kernel
            raise RuntimeError(
                f"{self._block} calls attention that Transformer Engine has no float8 kernel for here, with queries"
                f" {tuple(query.shape)} and keys {tuple(key.shape)}: {str(error).rstrip('.')}."
                " Use fp8_attention=False."
            ) from error
        return out_BTD.unflatten(-1, (query.shape[1], value.shape[3])).transpose(1, 2)
