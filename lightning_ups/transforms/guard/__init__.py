"""Seeing steps that go wrong, and leaving them out, without waiting for the device."""

from lightning_ups.transforms.guard.anomaly import LossWatch, Verdict
from lightning_ups.transforms.guard.deferred import Deferred

__all__ = ["Deferred", "LossWatch", "Verdict"]
