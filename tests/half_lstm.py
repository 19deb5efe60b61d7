"""Whether this CPU computes an LSTM in bfloat16, which torch leaves to oneDNN and which needs AVX-512."""

from functools import cache

import pytest
import torch
from torch import nn

__all__ = ["skip_without"]


@cache
def _runs() -> bool:
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(4, 3)(torch.randn(2, 1, 4))
    except RuntimeError as error:
        if "primitive descriptor" in str(error):
            return False
        raise
    return True


def skip_without() -> None:
    """Skip the test that runs if stock torch cannot compute it here."""
    if not _runs():
        pytest.skip("oneDNN has no LSTM in bfloat16 for this CPU")
