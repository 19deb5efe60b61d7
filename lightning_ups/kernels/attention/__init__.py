"""Attention: one function for all kernels, and a way to route torch's own attention to any of them."""

from lightning_ups.kernels.attention.api import attention
from lightning_ups.kernels.attention.auto import decisions, recorded_decisions
from lightning_ups.kernels.attention.masks import Documents
from lightning_ups.kernels.attention.reference import reference_attention
from lightning_ups.kernels.attention.routing import routed_attention
from lightning_ups.kernels.attention.support import Backend

__all__ = [
    "Backend",
    "Documents",
    "attention",
    "decisions",
    "recorded_decisions",
    "reference_attention",
    "routed_attention",
]
