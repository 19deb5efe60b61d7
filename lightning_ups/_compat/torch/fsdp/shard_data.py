"""Writes to a shard's data, and by index, which torch silently loses."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_ups._compat.contexts import ThreadStack
from lightning_ups._compat.patches import applied
from lightning_ups._compat.torch.tensors.tensors import count_writes, whole_of


class IndexReads:
    """Copies that were read from shards by index: writes to them do not reach the shard."""

    def __init__(self) -> None:
        self._read: list[tuple[Tensor, int, tuple[int, ...]]] = []  # copy, its version then, shape of the shard

    def add(self, copy: Tensor, shard: Tensor) -> None:
        """Record that ``copy`` was read from ``shard``."""
        self._read.append((copy, count_writes(copy), tuple(shard.shape)))

    def check(self) -> None:
        """Raise a RuntimeError if a copy that was read since the last call was written to."""
        lost = [shape for copy, count, shape in self._read if count_writes(copy) != count]
        self._read.clear()
        if lost:
            raise RuntimeError(
                f"A sharded tensor of shape {lost[0]} was indexed, and the result written to. An index returns a"
                " gathered copy, so the write would be lost. Assign to the index: weight[0] = 0, not weight[0].zero_()."
            )


_READS: ThreadStack[IndexReads] = ThreadStack()


@contextmanager
def shard_data_written() -> Iterator[IndexReads]:
    """Make ``shard.data = values`` and ``shard[index] = values`` write to the shard, or raise, in the context.

    Torch sets the data of the ``DTensor`` itself, which has none: the wrapped tensor silently keeps its values. And
    indexing along a sharded dimension gathers, so that a write only changes the copy.

    Yields:
        What this thread reads by index; its ``check`` raises if such a copy was written to, as by ``shard[0].zero_()``.
    """
    own = {"data": property(_get, _set), "__getitem__": _get_item, "__setitem__": _set_item}
    reads = IndexReads()
    with ExitStack() as stack:
        stack.enter_context(_READS.holding(reads))
        for name, replacement in own.items():
            target = f"torch.distributed.tensor:DTensor.{name}"
            stack.enter_context(applied(target, lambda _, new=replacement: new, once=True))
        yield reads


def _get(shard: Tensor) -> Tensor:
    return torch.Tensor.data.__get__(shard)  # pyright: ignore[reportAttributeAccessIssue]


def _set(shard: DTensor, values: Tensor) -> None:
    if not isinstance(values, DTensor) and _is_whole_of(shard, values):
        values = distribute_tensor(values, shard.device_mesh, shard.placements, src_data_rank=None)
    if not isinstance(values, DTensor) or _description(values) != _description(shard):
        given = _said(values)
        raise ValueError(
            f"The data of a sharded parameter was set to a tensor that is {given}. Compute the values from the"
            " parameter itself, in its dtype, or shard them: torch.distributed.tensor.distribute_tensor(values,"
            " parameter.device_mesh, parameter.placements)."
        )
    # In place: FSDP2 gathers from memory that the part is a view of. And as a change that autograd does not record.
    shard._local_tensor.data.copy_(values._local_tensor)


def _get_item(shard: DTensor, index: Any) -> Tensor:
    item = torch.Tensor.__getitem__(shard, index)
    differentiated = torch.is_grad_enabled() and item.requires_grad  # torch does not allow writes to it
    if _has_no_values(shard) or differentiated or not (shard.is_leaf and _is_split(shard)):
        return item
    part = item._local_tensor if isinstance(item, DTensor) else item
    if part.untyped_storage().data_ptr() != shard._local_tensor.untyped_storage().data_ptr():
        item = _get(item)  # an alias: torch treats a copy like a view, whose version counter is that of the shard
        if (reads := _READS.innermost) is not None:
            reads.add(item, shard)
    return item


def _has_no_values(shard: DTensor) -> bool:
    """Return whether a graph is being traced; Dynamo of torch 2.11 runs operators on fake tensors without saying so."""
    return torch.compiler.is_compiling() or is_fake(shard._local_tensor)


def _set_item(shard: DTensor, index: Any, values: Any) -> None:
    if not (shard.is_leaf and _is_split(shard)):
        torch.Tensor.__setitem__(shard, index, values)
        return
    whole = shard.full_tensor().detach()
    whole[index] = whole_of(values)
    shard.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None))


def _is_split(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _said(values: Tensor) -> str:
    split = f"split as {values.placements}" if isinstance(values, DTensor) else "not split"
    return f"{split}, of {values.dtype} and on {values.device}"


def _is_whole_of(shard: DTensor, values: Tensor) -> bool:
    return (values.shape, values.dtype, values.device) == (shard.shape, shard.dtype, shard.device)


def _description(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.dtype, tensor.device
