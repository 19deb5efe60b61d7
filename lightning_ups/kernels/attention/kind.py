"""The kind of an attention call: everything that decides which backends support it, and that is constant in a model."""
# ruff: noqa: N803 (shape suffixes are capitals)

from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Kind", "constant", "kind_of"]


class Kind(NamedTuple):
    """An attention call without its lengths: constant in a model, so that a choice is made once.

    Args:
        device: The device type.
        dtype: The dtype of queries, keys and values.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        head_dim: Dimension of queries and keys.
        value_dim: Dimension of values.
        causal: Whether keys after the query are hidden.
        window: Whether only near keys are visible.
        documents: Whether only keys of the query's document are visible.
        softcap: Whether scores are limited by a tanh.
        mask: Whether a mask tensor is given, to `scaled_dot_product_attention`; `attention` has none.
        mask_trains: Whether the mask needs a gradient.
        dropout: Whether there is dropout; only in `scaled_dot_product_attention`.
        square: Whether there are as many queries as keys.
        one_key: Whether there is a single key.
        trains: Whether gradients are needed.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    window: bool = False
    documents: bool = False
    softcap: bool = False
    mask: bool = False
    mask_trains: bool = False
    dropout: bool = False
    square: bool = True
    one_key: bool = False
    trains: bool = True


def kind_of(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool,
    window: bool = False,
    documents: bool = False,
    softcap: bool = False,
    mask: Tensor | None = None,
    dropout: bool = False,
) -> Kind:
    """Return the kind of a call with tensors [batch, seq, heads, dim], as constants even if sizes are symbolic."""
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    return Kind(
        q_BSHD.device.type,
        q_BSHD.dtype,
        index(q_BSHD.shape[2]),
        index(k_BTKD.shape[2]),
        index(q_BSHD.shape[3]),
        index(v_BTKE.shape[3]),
        constant(causal),
        window,
        documents,
        constant(softcap),
        mask is not None,
        mask is not None and mask.requires_grad,
        constant(dropout),
        constant(queries == keys),
        constant(keys == 1),
        torch.is_grad_enabled() and (q_BSHD.requires_grad or k_BTKD.requires_grad or v_BTKE.requires_grad),
    )


def constant(truth: object) -> bool:
    """Return ``truth`` as a constant; in a compiled function it may be a comparison of symbols."""
    return True if truth else False  # noqa: SIM210  (`bool` of a symbol is one; a branch is not)
