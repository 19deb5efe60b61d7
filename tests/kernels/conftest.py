"""Each test compiles for itself: torch's limit of recompilations counts by code object, and tests share ours."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _compiled_for_one_test():
    yield
    torch.compiler.reset()
