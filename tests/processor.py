"""What the processor that runs the tests cannot do, by trying it."""

from functools import cache

import pytest
import torch
from torch import nn

__all__ = ["needs_lstm_by_autocast"]


def needs_lstm_by_autocast() -> None:
    """Skip the test where torch cannot train an LSTM by autocast to bfloat16, as on processors without AVX-512."""
    if (error := _why_not()) is not None:
        pytest.skip(f"torch trains no LSTM by autocast on this processor: {error}")


@cache
def _why_not() -> str | None:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = nn.LSTM(8, 4)(torch.randn(3, 2, 8))
        out.float().sum().backward()
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return None
