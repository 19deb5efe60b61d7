"""Fixtures of callbacks' tests."""

import pytest

from tests.late_device import put_in_place


@pytest.fixture
def late_device(monkeypatch):
    """Take tensors of the CPU for those of a device that is two batches behind; the module counts its batches."""
    return put_in_place(monkeypatch.setattr, lag=2)
