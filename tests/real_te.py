"""Transformer Engine itself, for tests on a GPU."""

import pytest

from lightning_ups._compat.optional import te
from lightning_ups._compat.optional.packages import has


def need_engine():
    """Skip a test where it is not installed; load it as a run does, with torch's cuDNN whatever the machine has."""
    if not has("transformer_engine"):
        pytest.skip("Transformer Engine is not installed")
    te.engine()
