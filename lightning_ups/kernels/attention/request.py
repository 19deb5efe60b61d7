"""The arguments of a kernel behind the attention operator, and its FLOPs."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Request", "attended_pairs"]


class Request(NamedTuple):
    """The arguments of `operator.attention_forward` besides its tensors.

    Args:
        cu_seqlens: [documents + 1] int32, boundaries in the concatenated rows, or None.
        max_seqlen: The maximum length of a document, or the length of a row without documents.
        causal: Whether keys after the query are hidden.
        window: Only keys less than this many positions away are visible; 0: all.
        softcap: The limit of the scores; 0: none.
        scale: The factor of the scores.
    """

    cu_seqlens: Tensor | None
    max_seqlen: int
    causal: bool
    window: int
    softcap: float
    scale: float

    @property
    def window_sides(self) -> tuple[int, int]:
        """How far a query sees back and ahead, as in the FlashAttention packages: -1 is unlimited."""
        reach = self.window - 1 if self.window else -1
        return reach, 0 if self.causal else reach


def attended_pairs(
    seq_q: int, seq_k: int, *, causal: bool, window: int = 0, cu_seqlens: Tensor | None = None, batch: int = 1
) -> int:
    """Return how many query-key pairs are multiplied in ``batch`` rows; a causal triangle is half a square.

    Documents count by their true lengths if ``cu_seqlens`` has values, and as equally long ones if it is a fake or meta
    tensor.
    """
    if cu_seqlens is None:
        return batch * _row(seq_q, seq_k, causal=causal, window=window)
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type == "meta":
        documents = cu_seqlens.shape[0] - 1
        mean = batch * seq_q // documents
        return documents * _row(mean, mean, causal=causal, window=window)
    lengths = torch.diff(cu_seqlens).tolist()
    return sum(_row(length, length, causal=causal, window=window) for length in lengths)


def _row(seq_q: int, seq_k: int, *, causal: bool, window: int) -> int:
    reach = min(window, seq_k) if window else seq_k
    if causal:
        return seq_q * reach - reach * reach // 2 if seq_q == seq_k else seq_q * seq_k // 2
    if not window:
        return seq_q * seq_k
    return 2 * seq_q * reach - reach * reach
