"""What a kernel behind our operator is asked for, and the rows and floating-point operations that it costs."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Request", "attended_pairs"]


class Request(NamedTuple):
    """The arguments of `operator.attention_forward` beside its tensors.

    Args:
        cu_seqlens: [documents + 1] int32 into batch and seq laid end to end, or None.
        max_seqlen: No document is longer; the length of a row without documents.
        causal: No key after the query is seen.
        window: Only keys less than so many positions away are seen; 0 for all.
        softcap: Where scores are bent to; 0 for not at all.
        scale: Factor of the scores.
    """

    cu_seqlens: Tensor | None
    max_seqlen: int
    causal: bool
    window: int
    softcap: float
    scale: float

    @property
    def window_sides(self) -> tuple[int, int]:
        """How far a query sees back and ahead, in the FlashAttention packages' words: -1 is without bound."""
        reach = self.window - 1 if self.window else -1
        return reach, 0 if self.causal else reach


def attended_pairs(
    seq_q: int, seq_k: int, *, causal: bool, window: int = 0, cu_seqlens: Tensor | None = None, batch: int = 1
) -> int:
    """Return how many pairs of a query and a key are multiplied in ``batch`` rows; a causal triangle is half a square.

    Documents are counted by their true lengths where ``cu_seqlens`` holds values, and as equally long ones where it is
    a fake or meta tensor.
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
