"""Copies a state to the host, into memory that is reused."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.tensors.pinned import pinned, unpin

_ALIGNMENT = 512  # bytes
_PLAIN = (Tensor, nn.Parameter)


class LocalShard:
    """Replaces a DTensor whose local part was copied. DCP plans it like the DTensor, and gets the copy.

    It is no DTensor itself, which would move its local part to the device of the mesh.
    """

    def __init__(self, source: DTensor, local: Tensor) -> None:
        self._source, self.local = source, local

    def __create_write_items__(self, fqn: str, obj: Any) -> list[Any]:
        if self._source.device_mesh.get_coordinate() is None:
            return []
        return self._source.__create_write_items__(fqn, self._source)


def is_sequence(value: Any) -> bool:
    """Return whether ``value`` is a list or a plain tuple; a named tuple cannot be built from its items alone."""
    return isinstance(value, list) or type(value) is tuple


def holds_tensors(value: Any) -> bool:
    """Return whether ``value`` is a list or a tuple whose items are saved separately."""
    return is_sequence(value) and any(
        isinstance(inner, (Tensor, LocalShard, Mapping)) or holds_tensors(inner) for inner in value
    )


class HostCopies:
    """Copies the tensors of nested dicts, lists and tuples to the host, always into the same memory.

    If there is a GPU, the memory is pinned, so that copies run at the speed of the bus. Pinning is slow, so the memory
    is kept. Only one copy can be in use at a time.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return ``state`` with every tensor replaced by its copy on the host, once all copies are done."""
        sources = _distinct(state)
        self._reserve(sum(_aligned(tensor.nbytes) for tensor in sources.values()))
        copies, offset = {}, 0
        for key, tensor in sources.items():
            place = self._memory[offset : offset + tensor.nbytes]
            copies[key] = place.view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor, non_blocking=True)
            offset += _aligned(tensor.nbytes)
        if any(tensor.is_cuda for tensor in sources.values()):
            torch.cuda.current_stream().synchronize()
        return _replaced(state, lambda tensor: copies[_key(tensor)])

    def close(self) -> None:
        """Free the memory."""
        unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, nbytes: int) -> None:
        if self._memory.nbytes < nbytes:
            self.close()
            self._memory = pinned(nbytes)


@torch.no_grad()
def plain(state: Any) -> Any:
    """Return ``state`` with every tensor subclass that wraps another tensor replaced by a plain copy on the host.

    Other tensors are not copied. A file should contain numbers, not the classes of the training code.
    """

    def copy_of(tensor: Tensor) -> Tensor:
        if type(tensor) in _PLAIN:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    return _replaced(state, copy_of)


def _distinct(state: Any) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return found.setdefault(_key(tensor), tensor)

    _replaced(state, note)
    return found


def _key(tensor: Tensor) -> tuple[Any, ...]:
    # Tied weights are one memory under two names, and are copied once. A subclass that wraps others has no address.
    if type(tensor) not in _PLAIN:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _replaced(state: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, DTensor):
        return LocalShard(state, copy_of(state.to_local()))  # without gradients this is always the same object
    if isinstance(state, Tensor):
        return copy_of(state)
    if isinstance(state, dict):
        return {key: _replaced(value, copy_of) for key, value in state.items()}
    if is_sequence(state):
        return type(state)(_replaced(value, copy_of) for value in state)
    return state


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
