"""What kind of attention is asked for: all that decides which backend can do it, and nothing that changes by batch."""
# ruff: noqa: N803 (shape suffixes are capitals)

from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Kind", "constant", "kind_of"]


class Kind(NamedTuple):
    """A request without its lengths: constant in a model, so that a choice made for it is made once.

    Args:
        device: Type of the device.
        dtype: Of queries, keys and values.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of queries and keys.
        value_dim: Width of values.
        causal: No key after the query is seen.
        window: Only near keys are seen.
        documents: Only keys of the query's own document are seen.
        softcap: Scores are bent by a tanh.
        mask: A mask tensor is given; `scaled_dot_product_attention` takes one, `attention` does not.
        mask_trains: And a gradient of it is wanted.
        dropout: Weights are dropped; likewise.
        square: There are as many queries as keys.
        one_key: There is a single key.
        trains: Gradients are wanted.
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
    """Return the kind of a request for tensors [batch, seq, heads, dim], in constants also where sizes are symbolic."""
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
    """Return whether ``truth`` holds; in a compiled function, where it may be a comparison of symbols, a constant."""
    return True if truth else False  # noqa: SIM210  (`bool` of a symbol is one; a branch is not)
