"""Modes that see every function of torch's as it is called."""

from contextlib import AbstractContextManager

import torch

__all__ = ["outside_function_modes"]


def outside_function_modes() -> AbstractContextManager[None]:
    """Return a context in which no such mode sees what is called; DTensors and their like compute as before."""
    return torch._C.DisableTorchFunction()
