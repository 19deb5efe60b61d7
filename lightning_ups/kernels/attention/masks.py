"""Which keys a query sees: documents of a packed batch, and the definition that the reference and all masks use."""
# ruff: noqa: N803 (shape suffixes are capitals)

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)  # not frozen: Lightning's precisions, which convert batches, could not modify it
class Documents:
    """The documents of a packed batch: a token sees only tokens of its own document.

    Create it with the batch, on the CPU (`from_ids`, `from_cu_seqlens`): finding the boundaries on a GPU synchronizes.
    Data loaders pin it and Lightning moves it like a tensor, and all layers share it.

    Args:
        ids: [batch, seq] int32, the index of each token's document, increasing by one from document to document.
        cu_seqlens: [documents + 1] int32, the start of each document in the concatenated rows of the batch, and the end
            of the last.
        max_seqlen: An upper bound of the documents' lengths, rounded up to a power of two, so that a compiled function
            sees few different values.
    """

    ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """Create it from ``ids`` [batch, seq]: a document is a run of equal numbers in one row.

        Raises:
            ValueError: If ``ids`` is not [batch, seq].
        """
        if ids.dim() != 2:
            raise ValueError(
                f"Document ids of shape {tuple(ids.shape)} are not [batch, seq]."
                " Use ids.unsqueeze(0) for a single sequence."
            )
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        ends = torch.tensor([ids.numel()], device=ids.device)
        return cls._from(starts, torch.cat((starts.flatten().nonzero().flatten(), ends)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, batch: int, seq: int) -> "Documents":
        """Create it from ``cu_seqlens`` [documents + 1], boundaries in the concatenated rows of ``batch * seq`` tokens.

        Raises:
            ValueError: If the boundaries do not increase from 0 to ``batch * seq``, or a document crosses the end of a
                row.
        """
        cu_seqlens = cu_seqlens.long()  # an index; uint8 would be a mask
        starts = torch.zeros(batch * seq + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts[cu_seqlens.clamp(0, batch * seq)] = True
        rows = torch.arange(batch + 1, device=cu_seqlens.device) * seq
        ends = cu_seqlens[:1].tolist() == [0] and cu_seqlens[-1:].tolist() == [batch * seq]
        if not (ends and bool(starts[rows].all()) and bool((cu_seqlens.diff() >= 0).all())):
            raise ValueError(
                f"cu_seqlens of shape {tuple(cu_seqlens.shape)} do not cut {batch} rows of {seq} tokens into documents."
                f" They are boundaries in the concatenated rows, rising from 0 to {batch * seq}, and every row's end is"
                " one of them."
            )
        return cls._from(starts[:-1].unflatten(0, (batch, seq)), cu_seqlens)

    @classmethod
    def _from(cls, starts: Tensor, cu_seqlens: Tensor) -> "Documents":
        longest = int(cu_seqlens.diff().max()) if starts.numel() else 1
        ids = starts.flatten().cumsum(0).view_as(starts) - 1
        bound = min(1 << (longest - 1).bit_length(), starts.shape[1])
        return cls(ids.to(torch.int32), cu_seqlens.to(torch.int32), bound)

    def to(self, *args: object, **kwargs: object) -> "Documents":
        """Return a copy on another device; accepts the arguments of ``Tensor.to``."""
        move = torch.Tensor.to
        return Documents(move(self.ids, *args, **kwargs), move(self.cu_seqlens, *args, **kwargs), self.max_seqlen)  # type: ignore[arg-type]

    def pin_memory(self) -> "Documents":
        """Return a copy in pinned memory, from which it moves to a GPU without synchronizing."""
        return Documents(self.ids.pin_memory(), self.cu_seqlens.pin_memory(), self.max_seqlen)


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
