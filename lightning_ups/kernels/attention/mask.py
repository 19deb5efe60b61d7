"""Which keys a query sees: the definition that the reference and all masks use."""
# ruff: noqa: N803 (shape suffixes are capitals)

import torch
from torch import Tensor

__all__ = ["dense_mask", "visible"]


def visible(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    window: int | None,
    query_id: Tensor | None = None,
    key_id: Tensor | None = None,
) -> Tensor:
    """Return whether the query at position ``query`` sees the key at position ``key``; all arguments broadcast.

    Causal: no key after the query. Window: only keys less than ``window`` positions away. Documents: only keys of the
    query's document.
    """
    seen = (query >= key) if causal else torch.ones_like(query >= key)
    if window is not None:
        seen = seen & (query - key < window)
        if not causal:
            seen = seen & (key - query < window)
    if query_id is not None and key_id is not None:
        seen = seen & (query_id == key_id)
    return seen


def dense_mask(
    seq_q: int, seq_k: int, *, causal: bool, window: int | None, ids_BS: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return `visible` for all pairs, bool [batch or 1, 1, seq_q, seq_k], or None if every key is visible."""
    if not causal and window is None and ids_BS is None:
        return None
    query = torch.arange(seq_q, device=device).view(1, 1, seq_q, 1)
    key = torch.arange(seq_k, device=device).view(1, 1, 1, seq_k)
    query_id = None if ids_BS is None else ids_BS[:, None, :, None]
    key_id = None if ids_BS is None else ids_BS[:, None, None, :]
    return visible(query, key, causal=causal, window=window, query_id=query_id, key_id=key_id)
