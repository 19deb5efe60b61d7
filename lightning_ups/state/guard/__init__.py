"""Detects and skips bad steps without waiting for the device."""

from lightning_ups.state.guard.anomaly import LossWatch, Verdict
from lightning_ups.state.guard.deferred import Deferred
from lightning_ups.state.guard.kept_buffers import KeptBuffers
from lightning_ups.state.guard.saved import Saved, layout_of

__all__ = ["Deferred", "KeptBuffers", "LossWatch", "Saved", "Verdict", "layout_of"]
