"""Seeing steps that go wrong, and leaving them out, without waiting for the device."""

from lightning_ups.transforms.guard.anomaly import LossWatch, Verdict
from lightning_ups.transforms.guard.deferred import Deferred
from lightning_ups.transforms.guard.kept_buffers import KeptBuffers

__all__ = ["Deferred", "KeptBuffers", "LossWatch", "Verdict"]
