"""Triton, which need not be installed: kernels are written as functions, and compiled once one of them is wanted."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from lightning_ups._compat.optional.packages import require

__all__ = ["compiled", "language", "launching_on"]

# What a module of kernels calls ``tl`` until one of them is compiled: as much as their annotations say of it.
language: Any = SimpleNamespace(constexpr="constexpr")


def compiled(kernel: Callable[..., Any], *, feature: str, **options: Any) -> Any:
    """Return ``kernel`` as Triton launches it, and let ``tl`` be Triton's language where it is written.

    Args:
        kernel: A function whose module has imported `language` as ``tl``: Triton looks names up in its globals.
        feature: What needs Triton, for the error where it is missing.
        **options: Of ``triton.jit``.
    """
    triton: Any = require("triton", requirement="triton", extra="all", feature=feature)
    kernel.__globals__["tl"] = triton.language
    return triton.jit(kernel, **options)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on ``device``; interpreted ones, on a CPU, need none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
