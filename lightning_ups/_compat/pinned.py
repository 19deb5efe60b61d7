"""Host memory that a GPU copies to at full speed, of exactly the size that is asked for."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["pin", "pinned", "unpin"]


def pinned(nbytes: int) -> Tensor:
    """Return ``nbytes`` of host memory, pinned where there is a GPU, and plain where there is none."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    # Not `pin_memory=True`: torch's allocator rounds up to a power of two, which costs up to half of a large buffer.
    pin(memory)
    return memory


def pin(memory: Tensor) -> None:
    """Pin ``memory`` of the host where there is a GPU; pages that it shares with pinned memory are refused by CUDA."""
    if memory.nbytes and torch.cuda.is_available():
        _check(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Undo `pinned`, before the memory is freed."""
    if memory.nbytes and torch.cuda.is_available():
        _check(_runtime().cudaHostUnregister(memory.data_ptr()))


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(error: int) -> None:
    if int(error) != 0:
        raise RuntimeError(
            f"CUDA could not pin host memory for a checkpoint (error {int(error)})."
            " The limit of locked memory, or the memory of the machine, is too small for a copy of this rank's state."
            " Raise `ulimit -l`, or save synchronously (async_save=False)."
        )
