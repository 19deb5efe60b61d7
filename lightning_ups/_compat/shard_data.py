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
    alike = isinstance(values, DTensor) and (values.device_mesh, values.placements, values.shape) == (
        shard.device_mesh, shard.placements, shard.shape,
    )  # fmt: skip
    if not alike:
        given = f"split as {values.placements}" if isinstance(values, DTensor) else "not split"
        raise ValueError(
            f"The data of a parameter that is split over devices was set to a tensor that is {given}."
            " Each device holds its part of the parameter, and would have to take that of the values."
            " Compute the values from the parameter itself, or split them:"
            " torch.distributed.tensor.distribute_tensor(values, parameter.device_mesh, parameter.placements)."
        )
    torch.Tensor.data.__set__(shard, values)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(values, DTensor)
    shard._local_tensor = values._local_tensor.detach()
