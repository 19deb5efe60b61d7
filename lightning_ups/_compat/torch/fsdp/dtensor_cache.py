"""What torch remembers of operators on DTensors, by the value of their mesh."""

import torch
from torch.distributed.tensor import DTensor

__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Let this thread forget what operators make of DTensors: of two equal meshes it knows the groups of the earlier.

    These may be gone by then, with the world that they were of.
    """
    # Torch 2.11 and 2.13 have two such memories each, one of C++ and one of Python.
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()
    remembered = getattr(DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear", None)
    if remembered is not None:
        remembered()
