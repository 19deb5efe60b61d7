"""Optimizer states in host memory."""

from lightning_ups.optim.offload.memory import Copy, Form, Mark, Memory, form_of, memory_of, plain_parts, view_of
from lightning_ups.optim.offload.offload import OffloadedOptimizer, Update
from lightning_ups.optim.offload.torchao import TorchAOOffloaded

__all__ = [
    "Copy",
    "Form",
    "Mark",
    "Memory",
    "OffloadedOptimizer",
    "TorchAOOffloaded",
    "Update",
    "form_of",
    "memory_of",
    "plain_parts",
    "view_of",
]
