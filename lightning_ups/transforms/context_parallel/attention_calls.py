"""Replaces attention functions in the modules that call them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ups._compat.torch.tensors.attention import holders
from lightning_ups.kernels.attention.api import in_autocast_dtype
from lightning_ups.transforms.context_parallel.heads import attend_by_heads


@contextmanager
def replaced(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace ``function`` by ``replacement`` in each module that holds it; of this package, in models only.

    Compiled code has a guard on the function, so it is recompiled and never stale.
    """
    with ExitStack() as undo:
        for module, name in holders(function):
            if not module.__name__.startswith("lightning_ups.") or module.__name__.startswith("lightning_ups.models."):
                undo.enter_context(patch.object(module, name, replacement))
        yield


def torch_attention_by_heads(
    function: Callable[..., Tensor], group: ProcessGroup, is_split: Callable[..., bool]
) -> Callable[..., Tensor]:
    """Return ``function``, which is ``F.scaled_dot_product_attention``, for sequences that may be split over ``group``.

    Args:
        function: Torch's function, or what replaces it.
        group: The ranks.
        is_split: Whether the tensors of a call, with ``seq`` positions, are parts of sequences.
    """

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        if not is_split(query, key, value, seq=query.shape[-2]):
            return function(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
        if attn_mask is not None or not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(
                "Context parallelism splits scaled_dot_product_attention for [batch, heads, seq, dim] without"
                f" attn_mask; this call has queries {tuple(query.shape)} and"
                f" {'no mask' if attn_mask is None else f'a mask {tuple(attn_mask.shape)}'}."
                " Use is_causal=True or no mask, or lightning_ups.kernels.attention for documents and windows."
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return function(*heads, enable_gqa=enable_gqa, **options).transpose(1, 2)

        q, k, v = (tensor.transpose(1, 2) for tensor in in_autocast_dtype(query, key, value))
        return attend_by_heads(attend, q, k, v, group=group).transpose(1, 2)

    return scaled_dot_product_attention


def attention_by_heads(
    function: Callable[..., Tensor], group: ProcessGroup, is_split: Callable[..., bool]
) -> Callable[..., Tensor]:
    """Return ``function``, this package's `attention`, in the same way; ``documents`` are those of the whole rows."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not is_split(q, k, v, seq=q.shape[1]):
            return function(q, k, v, **options)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q, k, v, **options)

        return attend_by_heads(attend, *in_autocast_dtype(q, k, v), group=group)

    return attention
