"""Setting the data of a shard, which torch takes and forgets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["shard_data_written"]


@contextmanager
def shard_data_written() -> Iterator[None]:
    """Let ``shard.data = values`` set the values of the shard, or say why not, while the context is open.

    Torch sets the data of the ``DTensor`` itself, which has none: those of the tensor that it wraps stay as they were,
    and nothing is said.
    """
    kind: Any = DTensor
    if "data" in vars(kind):  # an outer context, or a torch that does it
        yield
        return
    kind.data = property(_get, _set)
    try:
        yield
    finally:
        del kind.data


def _get(shard: DTensor) -> Tensor:
    return torch.Tensor.data.__get__(shard)  # pyright: ignore[reportAttributeAccessIssue]


def _set(shard: DTensor, values: Tensor) -> None:
    if not isinstance(values, DTensor) or _description(values) != _description(shard):
        given = _said(values)
        raise ValueError(
            f"The data of a parameter that is split over devices was set to a tensor that is {given}."
            " Each device holds its part of the parameter, and would have to take that of the values."
            " Compute the values from the parameter itself, in its type, or split them:"
            " torch.distributed.tensor.distribute_tensor(values, parameter.device_mesh, parameter.placements)."
        )
    # In place: FSDP2 gathers from memory that the part is a view of. And as a change that autograd does not count.
    shard._local_tensor.data.copy_(values._local_tensor)


def _said(values: Tensor) -> str:
    split = f"split as {values.placements}" if isinstance(values, DTensor) else "not split"
    return f"{split}, of {values.dtype} and on {values.device}"


def _description(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.dtype, tensor.device
